"""Processes and threads of this machine, by psutil: what they use, and what a process has started. No torch, no MPI."""

import ctypes
import os
import time
from contextlib import suppress
from typing import NamedTuple

import psutil

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
LIBC = ctypes.CDLL(None)
END_S = 5.0  # what does not end by then hangs in the kernel, or belongs to another user
PAUSE_S = 0.001
SPINNING = (b"NCCL", b"pt_nccl", b"cuda")  # how the names of threads begin that use a processor while they wait
LOOP = b"gloo_tcp_loop"  # a thread that carries messages and, while none comes, wakes up a hundred times a second


def adopt() -> None:
    """Makes this process the parent of orphans below it. Its children have to call this for themselves."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_all() -> None:
    """Kills all descendants of this process, which has called `adopt`, whatever sessions they chose: its children,
    again and again, until none is left or END_S have passed."""
    until_s = time.monotonic() + END_S
    while time.monotonic() < until_s:
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                child.kill()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # there is none
            return
        time.sleep(PAUSE_S)


def below(process: int, *, recursive: bool = True) -> list[int]:
    """Returns the process ids of all descendants that a process has now, or of its children."""
    with suppress(psutil.Error):
        return [child.pid for child in psutil.Process(process).children(recursive)]
    return []


def is_alive(process: int) -> bool:
    """Returns whether a process exists and has not ended."""
    with suppress(psutil.Error):
        return psutil.Process(process).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def process_fields(process: int) -> tuple[str, float, int] | None:
    """Returns state, processor seconds (without those of `waiting`) and bytes of memory of a process; None if it does
    not exist."""
    with suppress(psutil.Error):
        threads = waiting(process)  # first: with what it uses in between, the process looks busy, never idle
        found = psutil.Process(process)
        with found.oneshot():
            used = found.cpu_times()
            return found.status(), used.user + used.system - threads.spun_s - threads.loops_s, found.memory_info().rss
    return None


class Waiting(NamedTuple):
    """What threads of a process have used that waits, in processor seconds.

    spun_s: NCCL's, between nodes for as long as a message is pending, those of torch that look after them, and those of
        CUDA's driver.
    loops_s: gloo's, with the messages that they have carried.
    num_loops: gloo's threads.
    """

    spun_s: float = 0.0
    loops_s: float = 0.0
    num_loops: int = 0


def waiting(process: int | str = "self") -> Waiting:
    """Returns what the threads of a process have used that waits."""
    spinning, loops = set(), set()
    with suppress(OSError):  # the process, or a thread of it, has ended
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/comm", "rb", buffering=0) as file:
                name = file.read()
            if name.startswith(SPINNING):
                spinning.add(int(thread))
            elif name.startswith(LOOP):
                loops.add(int(thread))
    if not spinning | loops:  # the watch calls this often, and must not look busy itself
        return Waiting()
    threads = psutil.Process(None if process == "self" else int(process)).threads()
    used_s = {thread.id: thread.user_time + thread.system_time for thread in threads}
    spun_s, loops_s = (sum(used_s.get(thread, 0.0) for thread in ids) for ids in (spinning, loops))
    return Waiting(spun_s, loops_s, len(loops))


def waits_for_disk() -> bool:
    """Returns whether a thread of this process is in uninterruptible sleep, e.g. while a file is written."""
    for thread in psutil.Process().threads():
        with suppress(psutil.Error):  # it has ended
            if psutil.Process(thread.id).status() == psutil.STATUS_DISK_SLEEP:
                return True
    return False
