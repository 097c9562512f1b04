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
from rlhf_spmd.pages.user_module import described, import_file, pass_on_interrupt


def load_named(spec: str, kind: str) -> Any:
    """Imports what a text names, and returns it. kind: what it should be, for messages ("function"). Raises UserError
    naming the wrong part and the fix."""
    target, _, name = spec.rpartition(":")
    if not target or not name.isidentifier():
        raise UserError(f"write it as module:{kind} or file.py:{kind}")
    path, in_file = Path(target), target.endswith(".py") or "/" in target
    if in_file and (path.suffix != ".py" or not is_file(path)):
        raise UserError(f"{path} {why_no_file(path) or 'is not a .py file'}")
    extend_import_path(path.resolve().parent if in_file else Path.cwd())
    try:  # the prefix cannot hide an installed module
        named = f"_rlhf_spmd_named_{path.stem}"
        module = import_file(path.resolve(), named) if in_file else importlib.import_module(target)
    except BaseException as error:
        pass_on_interrupt(error)
        fix = "fix the file"
        if isinstance(error, ModuleNotFoundError):
            fix = f"install {error.name} in this environment, start in its folder, or write path/to/file.py:{kind}"
        raise UserError(f"importing {target} raised {described(error, None)}: {fix}") from error
    if not hasattr(module, name):
        raise UserError(f"{target} has no {name!r}{did_you_mean(name, vars(module))}: name a {kind.lower()} of it")
    return getattr(module, name)


def extend_import_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # at the end, so it cannot hide installed packages
