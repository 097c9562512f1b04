"""Imports strategies and algorithms by name or by file, and any Python file that the user names.

Bytecode is neither read nor written. Importing a strategy from a run folder therefore does not change the folder, and
the newest version is read even if a file was written twice within a second.
"""

import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from signal import SIGINT, default_int_handler, getsignal, signal
from types import CodeType, FrameType, ModuleType
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import why_no_file
from rlhf_spmd.pages.option_suggestions import check_known

NOT_USERS = (str(Path(__file__).parents[1]), "<frozen")  # lines that say nothing about an error in a user's code

_interrupts: list[int] = []  # SIGINTs that this process has received


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def import_file(path: Path, name: str) -> ModuleType:
    """Imports a file and registers it in `sys.modules` under `name`. Raises whatever the code of the file raises."""
    loader = _Loader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None, "there is a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def modules_in(package: str, besides: tuple[str, ...] = ()) -> list[str]:
    """Returns the names of the public modules of a package, in order, without those in `besides`."""
    modules = pkgutil.iter_modules(importlib.import_module(package).__path__)
    return sorted(module.name for module in modules if not module.name.startswith("_") and module.name not in besides)


def load_module(kind: str, name: str, package: str, known: list[str]) -> tuple[ModuleType, str]:
    """Imports a module of `package` by its name, one of `known`, or a file (`path/to/mine.py`) -> module, source text.
    kind: "strategy" or "algorithm", for the messages. Raises UserError if there is no such module, or if the file
    raises."""
    if name.endswith(".py"):
        path = Path(name)
        if why := why_no_file(path):
            raise UserError(f"{kind} file {name} {why}")
        source_of(path)  # as the run folder keeps it
        try:
            module = import_file(path, f"_{kind}_{path.stem}")
        except BaseException as error:
            pass_on_interrupt(error)
            raise UserError(f"{kind} file {name} cannot be imported: {described(error, None)}") from error
    else:
        check_known(kind, name, known, ", or give a file path/to/mine.py")
        module = importlib.import_module(f"{package}.{name}")
    return module, source_of(Path(str(module.__file__)))


def source_of(path: Path) -> str:
    """Returns the text of a Python file in UTF-8. Raises UserError."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not in UTF-8 (byte {error.start + 1}): write it in UTF-8") from None


@contextmanager
def calling(
    who: str, function: Callable[..., Any], fix: str, *, lets: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Runs the block, one call of a user's function. Whatever it raises becomes a UserError that names the
    function and the line, but for UserErrors and those of `lets`, and the user's wish to end the program."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if isinstance(error, lets):
            raise
        pass_on_interrupt(error)
        raise UserError(f"{who} raised {described(error, function)}; {fix}") from error


@contextmanager
def naming(who: str) -> Iterator[None]:
    """Lets the message of a UserError in the block begin with the name of a page or strategy, once."""
    try:
        yield
    except UserError as error:
        raise UserError(who + str(error).removeprefix(who)) from error


def described(error: BaseException, function: Callable[..., Any] | None) -> str:
    """Describes an error of the user's code: `KeyError: 'x' (reward.py, line 7: return table[x])`, with the deepest
    line in the user's own file if any."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    text = type(error).__name__
    with suppress(Exception):  # of the user's own class
        text += f": {' '.join(str(error).split())[:300]}".removesuffix(": ")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(NOT_USERS)]
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    of_function = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    for frame in reversed(of_function or frames):
        return f"{text} ({frame.filename}, line {frame.lineno}: {frame.line})"
    return text


def remember_interrupts() -> None:
    """Lets `pass_on_interrupt` know from now on whether a SIGINT arrived; call it in the main thread. SIGINT still
    raises KeyboardInterrupt, unless this process was started to ignore it."""
    if getsignal(SIGINT) is default_int_handler:
        signal(SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _interrupts.append(number)
    default_int_handler(number, frame)


def pass_on_interrupt(error: BaseException) -> None:
    """Raises an error of user code again if it is the user's wish to end the program: a KeyboardInterrupt of a SIGINT;
    without `remember_interrupts`, any."""
    if isinstance(error, KeyboardInterrupt) and (_interrupts or getsignal(SIGINT) is default_int_handler):
        raise error
