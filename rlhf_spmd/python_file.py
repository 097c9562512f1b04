"""Imports a Python file that the user names: a strategy, a reward function.

Bytecode is neither read nor written: importing a strategy from a run folder does not change the folder, and a file that
is written twice within one second is always read in its second version.
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
    """Returns the module, which is also in `sys.modules` under `name`. Raises whatever the code of the file raises."""
    spec = importlib.util.spec_from_file_location(name, path, loader=_Loader(name, str(path)))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
