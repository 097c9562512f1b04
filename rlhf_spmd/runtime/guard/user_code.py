"""Calls code of the user inside this process, and puts right what it changed of the process.

The rest of the program depends on the working folder, on settings of torch, on handlers of signals and on the standard
streams. `guarded` compares these before and after a call. What differs is changed back, with one note for each function
and thing, so the run goes on with the same bits. A child of os.fork that comes back from the call is ended: it must not
touch this process's connections. Loads neither torch nor MPI.
"""

import os
import signal
import sys
from _signal import getsignal, pthread_sigmask  # those of signal make enums of the results, which takes 3 us
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType
from typing import Any, NoReturn

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.guard import signals, streams

NOTE = "rlhf_spmd: note: "
FORKED = "came back in a child of os.fork, too, which was ended: end a child by os._exit in the function"
DEPTH = sys.getrecursionlimit()  # a function may raise the limit
NOT_KNOWN = object()  # the first value of something that depends on the machine


@dataclass(frozen=True, slots=True)
class Setting:
    """Something that code may change.

    read, write: its value. Of torch, they also get the module, and first is the value that torch starts with.
    """

    what: str
    read: Callable[..., Any]
    write: Callable[..., object]
    first: Any = NOT_KNOWN


def _folder() -> str | object:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return NOT_KNOWN


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _handler(number: signal.Signals) -> Setting:
    def write(handler: Any) -> None:
        if handler is not None:  # None: of a library, which Python cannot set again
            signal.signal(number, handler)

    return Setting(f"the handler of {number.name}", lambda: getsignal(number), write)


def _has_alarm() -> bool:
    return signal.getitimer(signal.ITIMER_REAL)[0] > 0


OF_PROCESS = (
    Setting("the working folder", _folder, os.chdir),
    Setting("sys.stdout", lambda: sys.stdout, lambda stream: setattr(sys, "stdout", stream)),
    Setting("sys.stderr", lambda: sys.stderr, lambda stream: setattr(sys, "stderr", stream)),
    Setting("the umask", _umask, os.umask),
    Setting(
        "the blocked signals",
        lambda: pthread_sigmask(signal.SIG_BLOCK, ()),
        lambda blocked: pthread_sigmask(signal.SIG_SETMASK, blocked),
    ),
    Setting("the recursion limit", lambda: min(sys.getrecursionlimit(), DEPTH), sys.setrecursionlimit),
    *map(_handler, signals.USED),
)


def _device(torch: ModuleType) -> str:
    """Returns where a new tensor is made; a default device may be one that this machine lacks."""
    try:
        return torch.empty(0).device.type
    except (RuntimeError, AssertionError):
        return ""


def _set_inference(torch: ModuleType, is_on: bool) -> None:
    modes.append(torch.inference_mode(is_on))
    modes[-1].__enter__()


def _flag(path: str, first: bool) -> Setting:
    """Returns an attribute of a module of torch."""
    module, _, name = path.rpartition(".")
    owner = attrgetter(module)
    return Setting(f"torch.{path}", attrgetter(path), lambda torch, value: setattr(owner(torch), name, value), first)


SMALLEST = 5e-324  # 0 where the processor takes denormal numbers for 0
modes: list[Any] = []  # whoever drops such an object leaves its mode
# Each is written before the next is read, since inference mode sets the mode of gradients, too.
OF_TORCH = (
    Setting(
        "torch's inference mode",
        lambda torch: torch.is_inference_mode_enabled(),
        _set_inference,
        False,
    ),
    Setting(
        "torch's mode of gradients",
        lambda torch: torch.is_grad_enabled(),
        lambda torch, is_on: torch.set_grad_enabled(is_on),
        True,
    ),
    Setting(
        "torch's default device",
        _device,
        lambda torch, device: torch.set_default_device(None if device == "cpu" else device),
        "cpu",
    ),
    Setting(
        "torch's default dtype",
        lambda torch: str(torch.get_default_dtype()),
        lambda torch, name: torch.set_default_dtype(getattr(torch, name.removeprefix("torch."))),
        "torch.float32",
    ),
    *(
        Setting(
            f"torch's autocast on {kind}",
            lambda torch, kind=kind: torch.is_autocast_enabled(kind),
            lambda torch, is_on, kind=kind: torch.set_autocast_enabled(kind, is_on),
            False,
        )
        for kind in ("cpu", "cuda")
    ),
    Setting(
        "torch's number of threads",
        lambda torch: torch.get_num_threads(),
        lambda torch, num: torch.set_num_threads(num),
    ),
    Setting(
        "torch's deterministic algorithms",
        lambda torch: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda torch, both: torch.use_deterministic_algorithms(both[0], warn_only=both[1]),
        (False, False),
    ),
    Setting(
        "torch's precision of products",
        lambda torch: torch.get_float32_matmul_precision(),
        lambda torch, name: torch.set_float32_matmul_precision(name),
        "highest",
    ),
    Setting(
        "torch's treatment of denormal numbers",
        lambda torch: SMALLEST == 0,
        lambda torch, is_on: torch.set_flush_denormal(is_on),
        False,
    ),
    _flag("backends.cudnn.benchmark", False),
    _flag("backends.cudnn.deterministic", False),
    _flag("backends.mkldnn.enabled", True),
)


READ_PROCESS, READ_TORCH = ([setting.read for setting in settings] for settings in (OF_PROCESS, OF_TORCH))
FIRST = [setting.first for setting in OF_TORCH]


class Notes:
    """What has been said about user code in this process. tell: says it. A worker hands it to its rank, and of the
    ranks of a node one says it."""

    def __init__(self) -> None:
        self.said: set[tuple[str, str]] = set()  # who, what
        self.say_if(lambda text: True)

    def say_if(self, may: Callable[[str], bool]) -> None:
        """Sets which notes are said: those that `may` allows."""
        self.tell: Callable[[str], None] = lambda text: streams.say(NOTE + text) if may(text) else None

    def changed(self, who: str, what: list[str]) -> None:
        """Says once what a function has changed."""
        if new := [one for one in what if (who, one) not in self.said]:
            self.said.update((who, one) for one in new)
            self.tell(f"{who} changed {', '.join(new)}: changed back")

    def heard(self, text: str) -> None:
        """Says once what a worker has handed over."""
        if ("", text) not in self.said:
            self.said.add(("", text))
            self.tell(text)


class Children:
    """Children of os.fork that came back from user code: each writes its number into a pipe and ends, and this process
    reads the pipe to bury it, and to know that this was said."""

    def __init__(self) -> None:
        self.pipe: tuple[int, int] | None = None
        self.has_forked = False  # this process, since the pipe was made
        self.dead: set[int] = set()

    def expect(self) -> None:
        """Lets children tell from now on."""
        with suppress(OSError):
            self.pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            os.register_at_fork(after_in_parent=lambda: setattr(self, "has_forked", True))

    def bury(self) -> None:
        """Takes notice of those that have come back by now."""
        if self.pipe is None:
            self.expect()
        if self.pipe is None or not self.has_forked:
            return
        with suppress(OSError):  # none has, or a function has closed the pipe
            for line in os.read(self.pipe[0], 2**16).decode().split("\n")[:-1]:
                number, _, who = line.partition(" ")
                self.dead.add(int(number))
                notes.said.add((who, FORKED))
        for child in list(self.dead):
            try:
                is_over = os.waitpid(child, os.WNOHANG)[0] == child
            except ChildProcessError:  # the function itself waited for it
                is_over = True
            if is_over:
                self.dead.discard(child)

    def leave(self, who: str, descriptors: tuple[streams.Identity, ...]) -> NoReturn:
        """Ends this process, which is such a child. Runs nothing that it inherited: no handlers of exits, no buffers of
        streams."""
        error, status = sys.exception(), 1
        try:
            if isinstance(error, SystemExit):  # it meant to end
                status = error.code if isinstance(error.code, int) else int(error.code is not None)
            else:
                streams.restored(descriptors)
                if (who, FORKED) not in notes.said:
                    os.write(streams.ERRORS, f"{NOTE}{who} {FORKED}\n".encode(errors="backslashreplace"))
                if self.pipe is not None:  # otherwise there was no descriptor left for one
                    os.write(self.pipe[1], f"{os.getpid()} {who}\n".encode())
        finally:
            os._exit(status & 0xFF)


notes, children = Notes(), Children()


@contextmanager
def guarded(who: str) -> Iterator[None]:
    """Runs the block, one call of user code, and changes back what it changed, with a note. who: for the note, e.g.
    `reward function r.py:f`. Raises UserError if something can't be changed back."""
    children.bury()
    process, before = os.getpid(), [read() for read in READ_PROCESS]
    torch = _torch()
    had_alarm, descriptors = _has_alarm(), streams.kept()
    of_torch = FIRST if torch is None else [read(torch) for read in READ_TORCH]
    try:
        yield
    finally:
        if os.getpid() != process:
            children.leave(who, descriptors)
        changed = [f"descriptor {descriptor}" for descriptor in streams.restored(descriptors)]
        if _has_alarm() and not had_alarm:
            signal.alarm(0)
            changed.append("the alarm of SIGALRM")
        lost: list[str] = []
        if before != [read() for read in READ_PROCESS]:  # of all at once, which takes a third of the time
            lost = _restore(OF_PROCESS, before, changed)
        if (torch := _torch()) is not None and of_torch != [read(torch) for read in READ_TORCH]:
            lost += _restore(OF_TORCH, of_torch, changed, torch)
        notes.changed(who, changed)
        if lost:
            raise UserError(f"{who} changed {', '.join(lost)}, which can't be changed back: restore it in the function")


def _torch() -> ModuleType | None:
    """Returns torch, if it has been imported and not only begun to be."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "get_float32_matmul_precision") and hasattr(torch, "backends") else None


def _restore(settings: tuple[Setting, ...], before: list[Any], changed: list[str], *module: ModuleType) -> list[str]:
    """Adds to `changed` what it has changed back -> what it could not."""
    lost: list[str] = []
    for setting, value in zip(settings, before, strict=True):
        if value is NOT_KNOWN or (now := setting.read(*module)) is value or now == value:
            continue
        with suppress(OSError, RuntimeError, ValueError):
            setting.write(*module, value)
        (changed if setting.read(*module) == value else lost).append(setting.what)
    return lost


def pass_on_interrupt(error: BaseException) -> None:
    """Raises an error of user code again if it is the user's wish to end the program."""
    if isinstance(error, KeyboardInterrupt) and signals.interrupted():
        raise error
