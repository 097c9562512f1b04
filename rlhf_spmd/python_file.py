"""Imports a Python file that the user names: a strategy or a reward function.

Bytecode is neither read nor written. Importing a strategy from a run folder therefore does not change the folder, and
the newest version is read even if a file was written twice within a second.
"""

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str):
        return self.source_to_code(self.get_data(self.path), self.path)


def import_file(path: Path, name: str) -> ModuleType:
    """Imports a file and registers it in `sys.modules` under `name`. Raises whatever the code of the file raises."""
    spec = importlib.util.spec_from_file_location(name, path, loader=_Loader(name, str(path)))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
