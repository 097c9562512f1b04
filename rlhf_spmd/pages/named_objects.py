"""Functions and classes that the user names as `module:name` or `path/to/file.py:name`: reward functions, environments.

The file's folder (for a module: the working folder) is appended to the import path, so that the file can import modules
there.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import is_file, why_no_file
from rlhf_spmd.pages.option_suggestions import did_you_mean
from rlhf_spmd.pages.user_module import described, import_file
from rlhf_spmd.runtime.failure.signals import pass_on_interrupt


def load_named(spec: str, what: str) -> Any:
    """Imports what a text names, and returns it. what: it should be, for messages ("function"). Raises UserError naming
    the wrong part and the fix."""
    target, colon, name = spec.rpartition(":")
    if not colon or not target or not name.isidentifier():
        raise UserError(f"write it as module:{what} or file.py:{what}")
    module = _load_file(target) if target.endswith(".py") or "/" in target else _load_module(target, what)
    if not hasattr(module, name):
        raise UserError(f"{target} has no {name!r}{did_you_mean(name, vars(module))}: name a {what.lower()} of it")
    return getattr(module, name)


def _load_file(name: str) -> Any:
    path = Path(name).resolve()
    if path.suffix != ".py" or not is_file(path):
        raise UserError(f"{path} {why_no_file(path) or 'is not a .py file'}")
    extend_import_path(path.parent)
    try:
        return import_file(path, f"_rlhf_spmd_named_{path.stem}")  # the prefix cannot hide an installed module
    except BaseException as error:
        pass_on_interrupt(error)
        raise UserError(_import_message(str(path), error)) from error


def _load_module(name: str, what: str) -> Any:
    extend_import_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except BaseException as error:
        pass_on_interrupt(error)
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise UserError(
                f"there is no module {error.name!r} on the import path: install it, start in its folder, or write "
                f"path/to/file.py:{what}"
            ) from None
        raise UserError(_import_message(name, error)) from error


def extend_import_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # at the end, so it cannot hide installed packages


def _import_message(what: str, error: BaseException) -> str:
    fix = f"install {error.name} in this environment" if isinstance(error, ModuleNotFoundError) else "fix the file"
    return f"importing {what} raised {described(error, None)}: {fix}"
