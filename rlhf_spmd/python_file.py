"""Imports a Python file that somebody names: a strategy, a reward function.

Bytecode is neither read nor written: a folder such as that of a run stays as it is, and a file that is written twice
in one second is never mistaken for its first version.
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
    """The module of this file, in `sys.modules` under this name; whatever its code raises comes out."""
    spec = importlib.util.spec_from_file_location(name, path, loader=_Loader(name, str(path)))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
