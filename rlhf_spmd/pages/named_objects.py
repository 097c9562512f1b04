"""Functions and classes that the user names as `module:name` or `path/to/file.py:name`: reward functions, environments.

The file's folder (for a module: the working folder) is appended to the import path, so that the file can import modules
there.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import is_file, why_no_file
from rlhf_spmd.pages.user_module import described, import_file
from rlhf_spmd.runtime.failure.signals import pass_on_interrupt


def load_named(spec: str, what: str, use: str) -> tuple[ModuleType, str]:
    """Returns the module that a text names, imported, and the name in it. what: it should be, for messages
    ("function"). use: what for, in one word. Raises UserError naming the wrong part and the fix."""
    target, colon, name = spec.rpartition(":")
    if not colon or not target or not name.isidentifier():
        raise UserError(f"write it as module:{what} or file.py:{what}")
    in_file = target.endswith(".py") or "/" in target
    return (_load_file(Path(target), use) if in_file else _load_module(target, what)), name


def _load_file(path: Path, use: str) -> ModuleType:
    if path.suffix != ".py" or not is_file(path):
        raise UserError(f"{path} {why_no_file(path) or 'is not a .py file'}")
    path = path.resolve()
    extend_import_path(path.parent)
    try:
        return import_file(path, f"_rlhf_spmd_{use}_{path.stem}")  # the prefix cannot hide an installed module
    except BaseException as error:
        pass_on_interrupt(error)
        raise UserError(_import_message(str(path), error)) from error


def _load_module(name: str, what: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(f"{name!r} is not the name of a module, nor a file ending in .py")
    extend_import_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except BaseException as error:
        pass_on_interrupt(error)
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise UserError(
                f"there is no module {missing!r} on the import path: install it, start in its folder, or write "
                f"path/to/file.py:{what}"
            ) from None
        raise UserError(_import_message(name, error)) from error


def extend_import_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # at the end, so it cannot hide installed packages


def _import_message(what: str, error: BaseException) -> str:
    fix = f"install {error.name} in this environment" if isinstance(error, ModuleNotFoundError) else "fix the file"
    return f"importing {what} raised {described(error, None)}: {fix}"
