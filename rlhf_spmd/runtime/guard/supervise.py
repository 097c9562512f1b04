"""A supervisor process for every rank: reports how the rank ended if the rank could not, and leaves no process behind.

A process that gets SIGKILL or SIGSEGV, or whose code calls exit, cannot print a message, and the launcher then ends all
others at once. The program therefore forks before it loads MPI: the child is the rank; the parent only waits for it,
forwards signals, and copies the rank's flight record (flight_recorder.py) into the run folder. The rank ends with its
parent (PR_SET_PDEATHSIG), the parent with its front (front.py), and that with its launcher, however these end; and all
that the rank has started ends with it (descendants.py). The cost is two forks at the start and two small file writes
per second.
"""

import atexit
import ctypes
import faulthandler
import mmap
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from rlhf_spmd.runtime.guard import descendants, launcher, streams
from rlhf_spmd.runtime.guard.front import (
    LEAVE_S,
    LIBC,
    LOST_STATUS,
    PARENT_ENDED,
    SIGNALS,
    TICK_S,
    Front,
    Received,
    Reporter,
    is_alone,
    lost_message,
    name_of,
    next_signal,
    pause,
    place_of,
)
from rlhf_spmd.runtime.guard.last_checkpoint import resume_hint
from rlhf_spmd.runtime.guard.signals import signal_name
from rlhf_spmd.runtime.guard.surroundings import lack_of_shared_memory, lack_of_threads, shared_memory_bytes
from rlhf_spmd.runtime.observe import flight_recorder, node_files
from rlhf_spmd.runtime.observe.flight_recorder import BEAT, BEAT_AT, END, END_AT, Flight, Record, record_in

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
ASKED_BY = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})  # intended ends
FORWARDED = frozenset({signal.SIGTERM, signal.SIGINT})  # by launchers to all ranks; others only one rank gets
FAULTS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGSYS})
FROM_KERNEL = 0x80  # si_code of a signal from the terminal, which the rank also receives
STACK_LINES = 6
OOM_KILLS = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
OOM_TICKS = 20  # a rank that dies within this time after an out-of-memory kill on its host may have been its victim
SPINNING = ("NCCL", "pt_nccl", "cuda")  # how the names of threads begin that use a processor while they wait
CLOCK_TICKS, PAGE_BYTES = os.sysconf("SC_CLK_TCK"), resource.getpagesize()


def supervised() -> Flight:
    """Forks; returns in the child, which continues as the rank. The parent never returns."""
    memory, stack = mmap.mmap(-1, flight_recorder.SIZE), os.memfd_create("rlhf_spmd_stack")
    Flight(memory)  # makes a valid record, even if the child ends at once
    # before the forks: the rank may start, and the launcher end, before the parent gets here
    starter = os.getppid() if launcher.is_launched(os.environ) else None
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    mask, front = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS | {PARENT_ENDED}), None
    descendants.adopt()
    if starter is not None:
        front = os.getpid()
        if supervisor := os.fork():
            LIBC.prctl(PR_SET_NAME, b"front")  # what `top` shows
            Front(memory, supervisor, starter).run()
        os.setpgid(0, 0)
        _end_with(front, PARENT_ENDED)
        descendants.adopt()
    supervisor = os.getpid()
    if child := os.fork():
        LIBC.prctl(PR_SET_NAME, b"supervisor")
        Supervisor(memory, stack, child, front, starter).run()
    _end_with(supervisor, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    faulthandler.enable(file=stack)
    node_files.keep_compiled()
    flight = Flight(memory)
    atexit.register(flight.leave_undone)
    return flight


def _end_with(parent: int, number: int) -> None:
    """Makes this process get a signal when its parent ends."""
    LIBC.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before that
        os._exit(1)


def leave(status: int) -> NoReturn:
    """Ends a process after its work, whatever threads and processes of multiprocessing it has left. What must happen at
    an exit happens."""
    if (processes := sys.modules.get("multiprocessing.process")) is not None:
        for child in processes.active_children():
            child._config["daemon"] = True  # these are ended at an exit; for others Python waits for ever
    _refuse_exits()
    atexit._run_exitfuncs()  # threads that are no daemons are not waited for: Python would wait for ever
    streams.flush()
    # and not _exit: MPICH takes leave of its launcher in a handler of libc's exit
    libc_exit: Callable[[int], NoReturn] = ctypes.PyDLL(None).exit
    libc_exit(status)


def _refuse_exits() -> None:
    """Makes os._exit raise SystemExit in this process, which Python reports and goes on: MPI has not taken leave of its
    launcher yet, and the launcher would kill the other ranks."""
    rank, end = os.getpid(), os._exit

    def refuse(status: int) -> NoReturn:
        if os.getpid() != rank:  # a child of multiprocessing
            end(status)
        raise SystemExit(status)

    os._exit = refuse


class Supervisor:
    """The parent of one rank. front, launcher: process ids (front.py); None: started without a launcher."""

    def __init__(self, memory: mmap.mmap, stack: int, child: int, front: int | None, launcher: int | None):
        self.memory, self.stack, self.child, self.front = memory, stack, child, front
        self.reporter = Reporter(memory, launcher)
        self.shared_memory = shared_memory_bytes()  # before MPI takes its part
        self.num_oom_kills = deque([_num_oom_kills()], maxlen=OOM_TICKS)  # on this host, at the last ticks
        self.made: Path | None = None  # the folder of the record, once it exists
        self.asked: set[int] = set()
        self.most_bytes = 0
        self.left_s: float | None = None  # when the rank was seen to have no more to do

    def run(self) -> NoReturn:
        """Waits for the rank and ends with its status (128 + n if signal n ended it)."""
        ticked_s = 0.0
        while True:
            received = next_signal(SIGNALS | {PARENT_ENDED}, TICK_S)
            if received is not None and received.number not in (signal.SIGCHLD, PARENT_ENDED):
                self._pass_on(received)
            if self.front is not None and os.getppid() != self.front:
                self._end_without_front()
            process, status, usage = os.wait4(self.child, os.WNOHANG)
            if process:
                self._end(os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024)
            if time.monotonic() - ticked_s >= TICK_S:
                self._look()
                ticked_s = time.monotonic()

    def _pass_on(self, received: Received) -> None:
        self._note(received)
        if received.code != FROM_KERNEL or self.front is not None:
            os.kill(self.child, received.number)

    def _note(self, received: Received) -> None:
        if received.process != self.child:  # a function may signal the whole process group, which nobody asked for
            self.asked.add(received.number)

    def _look(self) -> None:
        fields = process_fields(self.child)
        if fields is not None:
            state, processor_s, num_bytes = fields
            self.most_bytes = max(self.most_bytes, num_bytes)
            (device_bytes,) = flight_recorder.NUMBER.unpack_from(self.memory, flight_recorder.DEVICE_AT)
            beat = time.time(), processor_s, num_bytes, self.most_bytes, device_bytes, state.encode()
            BEAT.pack_into(self.memory, BEAT_AT, *beat)
        self.num_oom_kills.append(_num_oom_kills())
        self.reporter.open_board()
        self._keep()
        if self.memory[flight_recorder.LEFT_AT]:
            self.left_s = time.monotonic() if self.left_s is None else self.left_s
            if time.monotonic() - self.left_s > LEAVE_S:
                self._end_late()

    def _keep(self) -> None:
        """Copies the record into the run folder; errors of the disk are ignored."""
        path = flight_recorder.record_path(self.memory)
        if path is None:
            return
        with suppress(OSError):
            if path.parent != self.made:
                path.parent.mkdir(mode=0o750, exist_ok=True)
                self.made = path.parent
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640)
            try:
                os.pwrite(descriptor, self.memory, 0)
            finally:
                os.close(descriptor)  # makes it visible to other hosts

    def _end(self, status: int, most_bytes: int) -> NoReturn:
        number = -status if status < 0 else 0
        if not number and self.memory[flight_recorder.LEFT_AT] == flight_recorder.DONE:
            status = record_in(self.memory).status  # whatever a handler at the exit made of it
        END.pack_into(self.memory, END_AT, time.time(), max(status, 0), number)
        self._keep()
        while (received := next_signal(SIGNALS, 0)) is not None:  # a batch system sends them to all at once
            self._note(received)
        asked = number in self.asked and (self.front is None or number in FORWARDED)
        asked = asked or (number == signal.SIGKILL and bool(self.asked & ASKED_BY))
        record = record_in(self.memory)
        lost = not asked if number else bool(record.host) and not record.has_left
        status = 128 + number if number else status or int(lost)
        try:
            by_kernel = _num_oom_kills() > self.num_oom_kills[0]
            self._clean_up()
            if lost and self.reporter.may_report():
                text = exit_message(record, most_bytes, by_kernel=by_kernel, shared_memory=self.shared_memory)
                if self.reporter.report(text + self._stack(), status):
                    pause(launcher.ABORT_S)
        except Exception:  # whatever it is, the rank has ended
            streams.say(traceback.format_exc())
        finally:
            os._exit(status)

    def _end_late(self) -> NoReturn:
        """Ends a rank that has done its work and announced its status, but that something keeps, perhaps MPI."""
        status = record_in(self.memory).status
        try:
            os.kill(self.child, signal.SIGKILL)
            self._clean_up()
            END.pack_into(self.memory, END_AT, time.time(), status, 0)
            self._keep()
            if self.reporter.may_report():
                who = name_of(record_in(self.memory))
                streams.say(f"rlhf_spmd: note: {who} had finished, but did not end in {LEAVE_S:.0f} s: it was killed")
            launcher.abort(os.environ, status)
        finally:
            os._exit(status)

    def _end_without_front(self) -> NoReturn:
        """Ends without the front: the launcher ends the job; or somebody has killed the front alone, and no rank will
        tell."""
        try:
            self._keep()
            launcher.unlink_shared_memory(self.child)  # the job ends, perhaps before its ranks have met
            self._clean_up()
            assert self.front is not None and self.reporter.launcher is not None, "there was a front"
            if is_alone(self.front, self.reporter.launcher) and self.reporter.may_report():
                self.reporter.report(lost_message(record_in(self.memory)), LOST_STATUS)
        finally:
            os._exit(LOST_STATUS)

    def _clean_up(self) -> None:
        """Ends what the rank has started, and removes what it shared outside the run folder."""
        descendants.end_all()
        node_files.remove()

    def _stack(self) -> str:
        """Returns the Python stack at a fatal signal, from faulthandler."""
        with suppress(OSError):
            lines = os.pread(self.stack, 100_000, 0).decode(errors="replace").split("\n")
            start = next((index for index, line in enumerate(lines) if line.startswith("Current thread")), None)
            if start is not None:
                return "\n" + "\n".join(line for line in lines[start : start + STACK_LINES] if line)
        return ""


def exit_message(record: Record, most_bytes: int, *, by_kernel: bool, shared_memory: tuple[int, int] = (0, 0)) -> str:
    """Returns the message about a rank that ended by a signal or its own exit.

    by_kernel: perhaps killed for lack of memory.
    shared_memory: size and free bytes on this node before MPI was loaded.
    """
    lack = "" if record.host else lack_of_shared_memory(launcher.num_on_node(os.environ), *shared_memory)
    if record.signal == signal.SIGABRT:  # libraries end the process if a thread can't be started
        lack = lack or lack_of_threads()
    since = f", {time.time() - record.since_s:.1f} s after that began" if record.num_begun else ""
    used = f"{most_bytes / 2**30:.1f} GiB"
    if record.signal == signal.SIGKILL and by_kernel:
        why = f"this host's kernel just killed processes because memory ran out; this one used {used} at most"
    elif record.signal == signal.SIGKILL:
        why = f"a user or the batch system sent it, perhaps because of the memory used ({used} at most)"
    elif record.signal in FAULTS and lack:
        why = lack
    elif record.signal in FAULTS:
        why = f"its own code failed, most likely compiled code (memory {used} at most)"
    elif record.signal:
        why = "another process, or its own code, sent it"
    else:
        why = "its code called exit (os._exit, or exit in compiled code)"
    ended = f"was ended by {signal_name(record.signal)}" if record.signal else f"exited with {record.status}"
    go_on = resume_hint(record.run, record.size)
    return f"{name_of(record)} {ended} {place_of(record)}{since}: {why}" + (f".\n{go_on}" if go_on else "")


def process_fields(process: int) -> tuple[str, float, int] | None:
    """Returns state, processor seconds (without those of `spun_s`) and bytes of memory of a process; None if it does
    not exist."""
    spun = spun_s(process)  # first: with what it uses in between, the process looks busy, never idle
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    _, fields = _name_and_fields(text)
    return fields[0], _processor_s(fields) - spun, int(fields[21]) * PAGE_BYTES


def spun_s(process: int | str = "self") -> float:
    """Returns processor seconds of those threads of a process that use it to wait: NCCL's, between nodes for as long as
    a message is pending, those of torch that look after them, and those of CUDA's driver."""
    return sum(_processor_s(fields) for name, fields in _threads(process) if name.startswith(SPINNING))


def waits_for_disk() -> bool:
    """Returns whether a thread of this process is in uninterruptible sleep, e.g. while a file is written."""
    return any(fields[0] == "D" for _, fields in _threads("self"))


def _threads(process: int | str) -> Iterator[tuple[str, list[str]]]:
    """Yields name and fields of every thread of a process."""
    try:
        threads = os.listdir(f"/proc/{process}/task")
    except OSError:  # the process has ended
        return
    for thread in threads:
        with suppress(OSError):
            path = Path(f"/proc/{process}/task/{thread}/stat")
            yield _name_and_fields(path.read_text(encoding="utf-8", errors="replace"))


def _name_and_fields(text: str) -> tuple[str, list[str]]:
    """Returns the name in a file of the kernel's named `stat`, which may hold anything, and the fields after it."""
    start, _, rest = text.rpartition(")")
    return start.partition("(")[2], rest.split()


def _processor_s(fields: Sequence[str]) -> float:
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def _num_oom_kills() -> int:
    """Returns how many processes the kernel has killed for lack of memory, on this host and, if known, in this
    container."""
    num = 0
    for path in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        with suppress(OSError), open(path, "rb", buffering=0) as file:
            num += sum(map(int, OOM_KILLS.findall(file.read(2**16))))
    return num
