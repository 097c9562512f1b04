"""A supervisor process for every rank: reports how the rank ended if the rank could not, and leaves no process behind.

A process that gets SIGKILL or SIGSEGV, or whose code calls exit, cannot print a message, and the launcher then ends all
others at once. The program therefore forks before it loads MPI: the child is the rank; the parent, its supervisor, only
waits for it, forwards signals, and copies the rank's record (records.py) into the run folder.

Launchers end a job with SIGKILL to the process groups of the processes that they started. So the supervisor has a
process group of its own and, under a launcher, a parent, the front, which the launcher has started; the front forwards
signals and the status, and ends a supervisor that is stopped. If one of the two is killed alone, the other one reports
it. The rank ends with its supervisor (PR_SET_PDEATHSIG), that with its front, and that with its launcher; and all that
the rank has started ends with it (processes.py).
"""

import atexit
import ctypes
import faulthandler
import os
import re
import shutil
import signal
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Set
from contextlib import suppress
from typing import NamedTuple, NoReturn

from rlhf_spmd.files import output
from rlhf_spmd.runtime.failure import launcher, processes
from rlhf_spmd.runtime.failure.failures import within
from rlhf_spmd.runtime.failure.last_checkpoint import resume_hint
from rlhf_spmd.runtime.failure.processes import LIBC, PR_SET_NAME, PR_SET_PDEATHSIG
from rlhf_spmd.runtime.failure.records import (
    DONE,
    SHARED_MEMORY,
    Record,
    keep_compiled,
    keep_message,
    prefix,
    remove_node_files,
)
from rlhf_spmd.runtime.failure.signals import ASKED_BY, signal_name

TICK_S = 0.5  # between two looks at the child
LEAVE_S = 20.0  # for a rank whose work is over, and then for its supervisor
LINGER_S = 2 * TICK_S  # after the message, so that the supervisors of the other ranks write their records first
PARENT_ENDED = signal.SIGRTMIN  # what the kernel sends to a supervisor if its front has ended
SIGNALS = frozenset(
    {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
)
FORWARDED = frozenset({signal.SIGTERM, signal.SIGINT})  # by launchers to all ranks; others only one rank gets
FAULTS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGSYS})
FROM_KERNEL = 0x80  # si_code of a signal from the terminal, which the rank also receives
LOST_STATUS = 128 + signal.SIGKILL
STACK_LINES = 6
OOM_KILLS = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
OOM_TICKS = 20  # a rank that dies within this time after an out-of-memory kill on its host may have been its victim
MPI_BYTES, MPI_LEAST = 8 << 20, 24 << 20  # of shared memory that MPI may need: for a rank, and for any number of them


def supervised() -> Record:
    """Forks; returns in the child, which continues as the rank. The parent never returns."""
    prefix()  # the same in all processes of this rank
    record, stack = Record.create(), os.memfd_create("rlhf_spmd_stack")
    # before the forks: the rank may start, and the launcher end, before the parent gets here
    starter = os.getppid() if launcher.is_launched(os.environ) else None
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    mask, front = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS | {PARENT_ENDED}), None
    processes.adopt()
    if starter is not None:
        front = os.getpid()
        if supervisor := os.fork():
            LIBC.prctl(PR_SET_NAME, b"front")  # what `top` shows
            Front(record, supervisor, starter).run()
        os.setpgid(0, 0)
        _end_with(front, PARENT_ENDED)
        processes.adopt()
    supervisor = os.getpid()
    if rank := os.fork():
        LIBC.prctl(PR_SET_NAME, b"supervisor")
        Supervisor(record, rank, front, starter, stack).run()
    _end_with(supervisor, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    faulthandler.enable(file=stack)
    keep_compiled()
    record.describe()
    atexit.register(record.leave_undone)
    return record


def _end_with(parent: int, number: int) -> None:
    """Makes this process get a signal when its parent ends."""
    LIBC.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before that
        os._exit(1)


def leave(status: int) -> NoReturn:
    """Ends a process after its work, whatever threads it has left. What must happen at an exit happens."""
    atexit._run_exitfuncs()  # threads that are no daemons are not waited for: Python would wait for ever
    output.flush()
    # and not _exit: MPICH takes leave of its launcher in a handler of libc's exit
    libc_exit: Callable[[int], NoReturn] = ctypes.PyDLL(None).exit
    libc_exit(status)


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


class Parent:
    """A process that waits for its child, forwards signals to it, and reports for a rank that cannot.

    check_parent: ends this process if its own parent has ended.
    look: does what is due twice a second.
    end: ends this process after its child, with the status of that (-n after signal n) and its most bytes of memory.
    """

    check_parent: Callable[[], None]
    look: Callable[[], None]
    end: Callable[[int, int], NoReturn]

    def __init__(self, record: Record, child: int, launcher: int | None):
        """launcher: its process id; None: started without one."""
        self.record, self.child, self.launcher = record, child, launcher
        self.first: Record | None = None  # of the first rank of this node, once the ranks have met
        self.num_late = 0  # looks since the child should have ended

    def run(self) -> NoReturn:
        """Waits for the child and ends with the status of its work."""
        looked_s = 0.0
        while True:
            received = next_signal(SIGNALS | {PARENT_ENDED}, TICK_S)
            if received is not None and received.number not in (signal.SIGCHLD, PARENT_ENDED):
                self.pass_on(received)
            self.check_parent()
            process, status, usage = os.wait4(self.child, os.WNOHANG)
            if process:
                self.end(os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024)
            if time.monotonic() - looked_s >= TICK_S:
                looked_s = time.monotonic()
                if self.first is None and self.record.first_process:
                    self.first = Record.of_process(self.record.first_process, self.record.first_descriptor)
                self.look()

    def pass_on(self, received: Received) -> None:
        """Sends a signal on to the child."""
        os.kill(self.child, received.number)

    def may_report(self) -> bool:
        """Returns whether no other rank of this node has reported. Until ranks have met, supervisors of one launcher
        compete for the name of a socket; a loser waits to be ended by the winner."""
        if self.first is not None:
            return self.first.claim()
        if self.launcher is not None:
            self.claim = socket.socket(socket.AF_UNIX)  # kept open, and with it the name
            try:
                self.claim.bind(f"\0rlhf_spmd/{self.launcher}")
            except OSError:
                next_signal({PARENT_ENDED}, launcher.SECOND_REPORT_S)
        return True

    def report(self, text: str, status: int) -> None:
        """Prints why the job ends, and asks the launcher to end it with this status."""
        keep_message(self.record.run, text)
        output.say(f"rlhf_spmd: error: {text}")
        time.sleep(LINGER_S)
        if launcher.abort(os.environ, status):
            next_signal({PARENT_ENDED}, launcher.ABORT_S)

    def check_late(self, name: str, is_over: bool, limit_s: float) -> None:
        """Ends a child that still lives although the work of its rank has been over for a while. Counts looks, not
        seconds: perhaps the whole job was stopped."""
        self.num_late = self.num_late + 1 if is_over else 0
        if self.num_late * TICK_S <= limit_s:
            return
        status = self.record.status if self.record.left else LOST_STATUS
        text = f"{name} did not end in {LEAVE_S:.0f} s after the work of its rank: it was killed"
        try:
            os.kill(self.child, signal.SIGKILL)
            os.waitpid(self.child, 0)
            clean_up()
            self.record.status, self.record.end_s = status, time.time()
            self.record.keep()
            if not self.record.left and self.may_report():
                self.report(f"{text}; the rank ended {place_of(self.record)}", status)
            elif self.record.left and self.may_report():
                output.say(f"rlhf_spmd: note: {text}")
                launcher.abort(os.environ, status)
        finally:
            os._exit(status)


class Front(Parent):
    """The parent of a supervisor: what the launcher has started, and kills at the end of a job."""

    def check_parent(self) -> None:
        if os.getppid() != self.launcher:
            os._exit(LOST_STATUS)  # the supervisor notices it

    def look(self) -> None:
        is_over = bool(self.record.left) or not processes.is_alive(self.record.process)
        self.check_late(f"the supervisor of {name_of(self.record)}", is_over, LEAVE_S + 2 * LINGER_S)

    def end(self, status: int, most_bytes: int) -> NoReturn:
        is_lost, status = status < 0, abs(status) + 128 * (status < 0)
        try:
            if is_lost:  # the supervisor was killed, and its rank with it
                clean_up()
                if self.may_report():
                    self.report(lost_message(self.record), status)
        finally:
            os._exit(status)


class Supervisor(Parent):
    """The parent of a rank."""

    def __init__(self, record: Record, child: int, front: int | None, launcher: int | None, stack: int):
        """Prepares the supervisor.

        front: its process id; None: there is none, nor a launcher.
        stack: the descriptor of faulthandler's file.
        """
        super().__init__(record, child, launcher)
        self.front, self.stack = front, stack
        self.free_bytes = _free_shared_memory()  # before MPI takes its part
        self.num_oom_kills = deque([_num_oom_kills()], maxlen=OOM_TICKS)  # on this host, at the last ticks
        self.asked: set[int] = set()

    def pass_on(self, received: Received) -> None:
        self._note(received)
        if received.code != FROM_KERNEL or self.front is not None:
            super().pass_on(received)

    def _note(self, received: Received) -> None:
        if received.process != self.child:  # a function may signal the whole process group, which nobody asked for
            self.asked.add(received.number)

    def check_parent(self) -> None:
        if self.front is None or os.getppid() == self.front:
            return
        try:  # the launcher ends the job; or somebody has killed the front alone, and no rank will tell
            self.record.keep()
            launcher.unlink_shared_memory(self.child)  # the job ends, perhaps before its ranks have met
            clean_up()
            assert self.launcher is not None, "there was a front"
            time.sleep(TICK_S / 2)
            others = [process for process in processes.below(self.launcher, recursive=False) if process != self.front]
            if any(map(processes.is_alive, others)) and self.may_report():
                self.report(lost_message(self.record), LOST_STATUS)
        finally:
            os._exit(LOST_STATUS)

    def look(self) -> None:
        record, fields = self.record, processes.process_fields(self.child)
        if fields is not None:
            state, record.processor_s, record.memory_bytes = fields
            record.most_memory_bytes = max(record.most_memory_bytes, record.memory_bytes)
            record.beat_s, record._state = time.time(), state.encode()
        self.num_oom_kills.append(_num_oom_kills())
        record.keep()
        self.check_late(name_of(record), bool(record.left), LEAVE_S)

    def end(self, status: int, most_bytes: int) -> NoReturn:
        record, number = self.record, max(0, -status)
        if not number and record.left == DONE:
            status = record.status  # whatever a handler at the exit made of it
        record.end_s, record.status, record.signal = time.time(), max(status, 0), number
        record.keep()
        while (received := next_signal(SIGNALS, 0)) is not None:  # a batch system sends them to all at once
            self._note(received)
        asked = number in self.asked and (self.front is None or number in FORWARDED)
        asked = asked or (number == signal.SIGKILL and bool(self.asked & ASKED_BY))
        lost = not asked if number else bool(record.host) and not record.left
        status = 128 + number if number else status or int(lost)
        try:
            by_kernel = _num_oom_kills() > self.num_oom_kills[0]
            clean_up()
            if lost and self.may_report():
                text = exit_message(record, most_bytes, by_kernel=by_kernel, free_bytes=self.free_bytes)
                self.report(text + self._stack(), status)
        except Exception:  # whatever it is, the rank has ended
            output.say(traceback.format_exc())
        finally:
            os._exit(status)

    def _stack(self) -> str:
        """Returns the Python stack at a fatal signal, from faulthandler."""
        _, current, rest = os.pread(self.stack, 100_000, 0).decode(errors="replace").partition("Current thread")
        lines = (current + rest).split("\n")[:STACK_LINES]
        return "\n" + "\n".join(filter(None, lines)) if current else ""


def clean_up() -> None:
    """Ends what the rank has started, and removes what it shared outside the run folder."""
    processes.end_all()
    remove_node_files()


def name_of(record: Record) -> str:
    """Names a rank in messages: rank 1 of 4 (host a, process 123)."""
    rank, size = record.rank, record.size
    if not record.host:  # it has not joined the others yet, but the launcher has numbered it
        place = launcher.launched(os.environ)
        rank, size = place.rank, place.num
    return f"rank {rank} of {size} (host {record.host or socket.gethostname()}, process {record.process})"


def place_of(record: Record) -> str:
    """Describes where a rank ended."""
    return within(record.where) if record.num_begun else "before it had joined the other ranks"


def lost_message(record: Record) -> str:
    """Returns the message about a rank whose supervisor, or the front of that, was killed."""
    text = f"the supervisor of {name_of(record)} was killed (SIGKILL), and the rank with it, {place_of(record)}"
    return f"{text}: a user or the batch system did it{_go_on(record)}"


def exit_message(record: Record, most_bytes: int, *, by_kernel: bool, free_bytes: int) -> str:
    """Returns the message about a rank that ended by a signal or its own exit.

    by_kernel: perhaps killed for lack of memory.
    free_bytes: of shared memory on this node before MPI was loaded.
    """
    why, used = "its code called exit (os._exit, or exit in compiled code)", f"{most_bytes / 2**30:.1f} GiB"
    needed = max(MPI_LEAST, MPI_BYTES * launcher.num_on_node(os.environ))
    if record.signal == signal.SIGKILL and by_kernel:
        why = f"this host's kernel just killed processes because memory ran out; this one used {used} at most"
    elif record.signal == signal.SIGKILL:
        why = f"a user or the batch system sent it, perhaps because of the memory used ({used} at most)"
    elif record.signal in FAULTS and not record.host and free_bytes < needed:
        why = (
            f"most likely {SHARED_MEMORY} is too small: {free_bytes / 2**20:.3g} MiB were free, and MPI may need "
            f"{needed / 2**20:.3g} MiB for the ranks on this node; enlarge it (`docker run --shm-size=1g`)"
        )
    elif record.signal in FAULTS:
        why = "its own code failed, most likely compiled code, or it could not start a thread (`ulimit -u`)"
    elif record.signal:
        why = "another process, or its own code, sent it"
    since = f", {time.time() - record.now.since_s:.1f} s after that began" if record.num_begun else ""
    ended = f"was ended by {signal_name(record.signal)}" if record.signal else f"exited with {record.status}"
    return f"{name_of(record)} {ended} {place_of(record)}{since}: {why}" + _go_on(record)


def _go_on(record: Record) -> str:
    go_on = resume_hint(record.run, record.size)
    return f".\n{go_on}" if go_on else ""


def _num_oom_kills() -> int:
    """Returns how many processes the kernel has killed for lack of memory, on this host and, if known, in this
    container."""
    num = 0
    for path in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        with suppress(OSError), open(path, "rb", buffering=0) as file:
            num += sum(map(int, OOM_KILLS.findall(file.read(2**16))))
    return num


def _free_shared_memory() -> int:
    with suppress(OSError):
        return shutil.disk_usage(SHARED_MEMORY).free
    return 0
