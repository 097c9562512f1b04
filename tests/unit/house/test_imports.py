"""Every name that a file imports from this repository exists: an import inside a function fails only when it runs."""

import ast
import functools
from pathlib import Path

import pytest

from rlhf_spmd.kernels.cpu import COMPILED
from tests.import_rules import ROOT

FOLDERS = {"rlhf_spmd": "rlhf_spmd", "rlhf_spmd.kernels": "kernels", "rlhf_spmd.strategies": "strategies"}
FOLDERS |= {"bench": "bench", "tests": "tests"}


def file_of(module: str) -> Path | None:
    """Returns the file of a module of this repository; None for all others."""
    package = max((name for name in FOLDERS if (module + ".").startswith(name + ".")), key=len, default=None)
    if package is None:
        return None
    path = ROOT.joinpath(FOLDERS[package], *module.removeprefix(package).split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def defined(path: Path) -> set[str]:
    """Returns the names that a module binds anywhere outside functions and classes."""
    names, todo = set(), [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.alias):
                names.add(node.asname or node.name.split(".")[0])
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            else:
                todo.append(node)
    return names


def missing(text: str) -> list[str]:
    """Returns what a file imports that does not exist, as MODULE or MODULE.NAME."""
    lacks = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            paths = {alias.name: file_of(alias.name) for alias in node.names}
            lacks += [name for name, path in paths.items() if path is not None and not path.exists()]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            path = file_of(node.module)
            if path is None:
                continue
            names = defined(path) if path.exists() else set()
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                if alias.name not in names and module != COMPILED and not file_of(module).exists():
                    lacks.append(module)
    return lacks


@pytest.mark.parametrize("folder", ["rlhf_spmd", "kernels", "strategies", "bench", "tests"])
def test_imported_names_exist(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    lacks = {path.relative_to(ROOT).as_posix(): missing(path.read_text(encoding="utf-8")) for path in files}
    assert {path: names for path, names in lacks.items() if names} == {}


def test_a_missing_name_is_found():
    assert missing("def f():\n    from rlhf_spmd.errors import UserError, Other\n") == ["rlhf_spmd.errors.Other"]
    assert missing("import rlhf_spmd.nothing, torch\nfrom os import path") == ["rlhf_spmd.nothing"]
    assert missing("from rlhf_spmd.nothing import x\nfrom rlhf_spmd.kernels import philox\n") == ["rlhf_spmd.nothing.x"]
