"""Imports strategies and algorithms by name or by file, and any Python file that the user names.

Bytecode is neither read nor written. Importing a strategy from a run folder therefore does not change the folder, and
the newest version is read even if a file was written twice within a second.
"""

import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from rlhf_spmd.errors import UserError, pass_on_interrupt
from rlhf_spmd.files.reading import why_no_file
from rlhf_spmd.pages.option_suggestions import check_known

COOKIE = re.compile(r"^([ \t\f]*#.*?coding[:=][ \t]*)[-\w.]+")  # PEP 263
NOT_USERS = (str(Path(__file__).parents[1]), "<frozen")  # lines that say nothing about an error in a user's code


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
    found = [module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__)]
    return sorted(name for name in found if not name.startswith("_") and name not in besides)


def load_module(kind: str, name: str, package: str, known: list[str]) -> tuple[ModuleType, str]:
    """Imports a module of `package` by its name, one of `known`, or a file (`path/to/mine.py`) -> module, source text.
    kind: "strategy" or "algorithm", for the messages. Raises UserError if there is no such module, or if the file
    raises."""
    if name.endswith(".py"):
        path = Path(name)
        if why := why_no_file(path):
            raise UserError(f"{kind} file {name} {why}")
        try:
            source_of(path)  # as the run folder keeps it
            module = import_file(path, f"_{kind}_{path.stem}")
        except BaseException as error:
            pass_on_interrupt(error)
            raise UserError(f"{kind} file {name} cannot be imported: {described(error, None)}") from error
    else:
        check_known(kind, name, known, ", or give a file path/to/mine.py")
        module = importlib.import_module(f"{package}.{name}")
    return module, source_of(Path(str(module.__file__)))


def source_of(path: Path) -> str:
    """Returns the text of a Python file. What it says about its encoding is made true for a copy in UTF-8. Raises
    SyntaxError and UnicodeDecodeError."""
    lines = importlib.util.decode_source(path.read_bytes()).split("\n")
    found = (COOKIE.sub(r"\1utf-8", line) if number < 2 else line for number, line in enumerate(lines))
    return "\n".join(found)


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


def named(error: UserError, who: str) -> UserError:
    """Returns an error whose message begins with the name of a page or strategy, once."""
    return UserError(who + str(error).removeprefix(who))


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
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    for frame in reversed(own or frames):
        return f"{text} ({frame.filename}, line {frame.lineno}: {frame.line})"
    return text
