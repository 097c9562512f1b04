"""The process that the launcher has started, in front of a supervisor: what the launcher kills at the end of a job.

Launchers end a job with SIGKILL to the process groups of the processes that they started. A supervisor in that group
could neither say why its rank ended nor end what the rank has started. So the supervisor has a process group of its
own, and a parent, the front, that passes on signals and the status. If one of the two is killed alone, the other one
says so.
"""

import ctypes
import mmap
import os
import signal
import socket
import time
from collections.abc import Set
from contextlib import suppress
from typing import NamedTuple, NoReturn

from rlhf_spmd.runtime.guard import descendants, launcher, streams
from rlhf_spmd.runtime.guard.last_checkpoint import resume_hint
from rlhf_spmd.runtime.observe import flight_recorder, node_files
from rlhf_spmd.runtime.observe.flight_recorder import Record, record_in
from rlhf_spmd.runtime.observe.position_board import take_claim

TICK_S = 0.5  # between two looks at the processes beside this one
LEAVE_S = 20.0  # for a rank that has no more to do, and then for a supervisor
LINGER_S = 2 * TICK_S  # after the message, so that the supervisors of the other ranks write their records first
PARENT_ENDED = signal.SIGRTMIN  # what the kernel sends to a supervisor if its front has ended
SIGNALS = frozenset(
    {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
)
LOST_STATUS = 128 + signal.SIGKILL
LIBC = ctypes.CDLL(None)


class Received(NamedTuple):
    """A signal. code: si_code; process: that sent it."""

    number: int
    code: int
    process: int


def next_signal(numbers: Set[int], timeout_s: float) -> Received | None:
    """Waits for one of these signals, which are blocked; None if none came, or if the wait was interrupted.

    Python's signal.sigtimedwait returns numbers of chance where the process was stopped until the time was over (3.11
    reads a siginfo that nobody has written), and a rank would get such a signal.
    """
    mask = (ctypes.c_uint64 * 16)(sum(1 << number - 1 for number in numbers))
    seconds, info = (ctypes.c_long * 2)(int(timeout_s), int(timeout_s % 1 * 1e9)), (ctypes.c_int * 32)()
    number = LIBC.sigtimedwait(mask, info, seconds)
    return Received(number, info[2], info[4]) if number > 0 else None


class Reporter:
    """Reports for a rank that cannot. memory: its flight record. launcher: process id; None: there is none."""

    def __init__(self, memory: mmap.mmap, launcher: int | None):
        self.memory, self.launcher = memory, launcher
        self.board: int | None = None

    def open_board(self) -> None:
        """Opens the node's shared memory, in which ranks agree who reports; it is unlinked, so opened via /proc."""
        fields = flight_recorder.WHO.unpack_from(self.memory, 0)
        process, descriptor = fields[3], fields[6]
        if self.board is None and descriptor > 0:
            with suppress(OSError):
                self.board = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)

    def may_report(self) -> bool:
        """Returns whether no other rank of this node has reported. Until ranks share a board, supervisors of one
        launcher compete for a name; a loser waits to be ended by the winner."""
        if self.board is not None:
            return take_claim(self.board, mmap.mmap(self.board, 1))
        if self.launcher is None:
            return True
        self.claim = socket.socket(socket.AF_UNIX)  # kept open, and with it the name
        try:
            self.claim.bind(f"\0rlhf_spmd/{self.launcher}")
        except OSError:
            pause(launcher.SECOND_REPORT_S)
        return True

    def report(self, text: str, status: int) -> bool:
        """Says why the job ends, and asks the launcher to end it with this status -> whether it will."""
        flight_recorder.keep_message(record_in(self.memory).run, text)
        streams.say(f"rlhf_spmd: error: {text}")
        time.sleep(LINGER_S)
        return launcher.abort(os.environ, status)


def pause(seconds: float) -> None:
    """Waits, but no longer than the parent of this process lives."""
    next_signal({PARENT_ENDED}, seconds)


def name_of(record: Record) -> str:
    """Names a rank in messages: rank 1 of 4 (host a, process 123)."""
    rank, size = record.rank, record.size
    if not record.host:  # it has not joined the others yet, but the launcher has numbered it
        place = launcher.launched(os.environ)
        rank, size = place.rank, place.num
    return f"rank {rank} of {size} (host {record.host or socket.gethostname()}, process {record.process})"


def place_of(record: Record) -> str:
    """Says where a rank ended."""
    if not record.num_begun:
        return "before it had joined the other ranks"
    after = record.where.startswith("after ")  # between two actions
    return record.where if after else f"in {record.where}"


def lost_message(record: Record) -> str:
    """Returns the message about a rank whose supervisor, or the front of that, was killed."""
    go_on = resume_hint(record.run, record.size)
    text = f"the supervisor of {name_of(record)} was killed (SIGKILL), and the rank with it, {place_of(record)}"
    return f"{text}: a user or the batch system did it" + (f".\n{go_on}" if go_on else "")


class Front:
    """Waits for the supervisor. supervisor, launcher: process ids."""

    def __init__(self, memory: mmap.mmap, supervisor: int, launcher: int):
        self.reporter, self.supervisor, self.launcher = Reporter(memory, launcher), supervisor, launcher
        self.num_late = 0  # looks since the rank has ended

    def run(self) -> NoReturn:
        """Passes signals on, and ends with the supervisor's status, or with the launcher."""
        while True:
            received = next_signal(SIGNALS, TICK_S)
            if received is not None and received.number != signal.SIGCHLD:
                os.kill(self.supervisor, received.number)
            process, status = os.waitpid(self.supervisor, os.WNOHANG)
            if process:
                self._end(os.waitstatus_to_exitcode(status))
            if os.getppid() != self.launcher:
                os._exit(LOST_STATUS)  # the supervisor notices it
            self.reporter.open_board()
            if received is None:  # after TICK_S, but if the whole job was stopped
                memory, rank = self.reporter.memory, record_in(self.reporter.memory).process
                has_ended = memory[flight_recorder.LEFT_AT] or not _lives(rank)
                self.num_late = self.num_late + 1 if has_ended else 0
                if self.num_late * TICK_S > LEAVE_S + 2 * LINGER_S:
                    self._end_late()

    def _end(self, status: int) -> NoReturn:
        is_lost, status = status < 0, 128 - status if status < 0 else status
        try:
            if is_lost:  # the supervisor was killed, and its rank with it
                descendants.end_all()
                node_files.remove()
                if self.reporter.may_report():
                    message = lost_message(record_in(self.reporter.memory))
                    if self.reporter.report(message, status):
                        time.sleep(launcher.ABORT_S)
        finally:
            os._exit(status)

    def _end_late(self) -> NoReturn:
        """Ends a supervisor that does not end although its rank has, perhaps because somebody stopped it."""
        record, memory = record_in(self.reporter.memory), self.reporter.memory
        status = record.status if memory[flight_recorder.LEFT_AT] == flight_recorder.DONE else LOST_STATUS
        try:
            os.kill(self.supervisor, signal.SIGKILL)
            os.waitpid(self.supervisor, 0)
            descendants.end_all()
            node_files.remove()
            told = f"the supervisor of {name_of(record)} did not end in {LEAVE_S:.0f} s after the rank: it was killed"
            if status == LOST_STATUS and self.reporter.may_report():
                self.reporter.report(f"{told}; the rank ended {place_of(record)}", status)
            elif self.reporter.may_report():
                streams.say(f"rlhf_spmd: note: {told}")
        finally:
            os._exit(status)


def is_alone(front: int, launcher_process: int) -> bool:
    """Returns whether the launcher still has other processes, so that it is not ending the job: only this front has
    ended."""
    time.sleep(TICK_S / 2)
    return any(_lives(process) for process in descendants.children_of(launcher_process) if process != front)


def _lives(process: int) -> bool:
    with suppress(OSError), open(f"/proc/{process}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    return False
