"""Imports point one way, heavy packages stay behind one file each, files and functions stay short."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Folders of the package, by the name they install under.
FOLDERS = {"rlhf_spmd": "rlhf_spmd", "kernels": "rlhf_spmd.kernels", "strategies": "rlhf_spmd.strategies"}
BESIDE = ("tests", "bench")  # folders that import anything, but keep their files and functions as short
MAX_LINES, MAX_FUNCTION = 399, 80
ANYTHING = ("",)

# module or package -> what of ours it may import (beside errors); the longest matching name counts.
OURS: dict[str, tuple[str, ...]] = {
    "rlhf_spmd": (),
    "rlhf_spmd.__main__": ANYTHING,  # but late, see LAZY
    "rlhf_spmd.algorithms": ("plan",),
    "rlhf_spmd.algorithms.order": (),
    "rlhf_spmd.calibration_file": ("plan",),
    "rlhf_spmd.check_verb": ("plan", "config", "strategy", "cluster_file", "fitting"),
    "rlhf_spmd.cluster_file": ("plan",),
    "rlhf_spmd.config": ("plan", "algorithms", "model.config", "embedded", "option_names"),
    "rlhf_spmd.embedded": (),
    "rlhf_spmd.embedded.make": ANYTHING,
    "rlhf_spmd.kernels": ("kernels",),
    "rlhf_spmd.model": ("model", "kernels", "plan.shard"),
    "rlhf_spmd.model.config": (),
    "rlhf_spmd.plan": ("plan",),
    "rlhf_spmd.fitting": ("plan", "strategy"),
    "rlhf_spmd.generate_verb": ("model", "plan", "runtime"),
    "rlhf_spmd.option_names": (),
    "rlhf_spmd.plan_verb": ("plan", "config", "strategy", "calibration_file", "cluster_file", "fitting", "runtime"),
    "rlhf_spmd.python_file": (),
    "rlhf_spmd.runtime": ("runtime", "plan", "model", "kernels", "algorithms", "config", "python_file"),
    "rlhf_spmd.strategies": ("plan",),
    "rlhf_spmd.strategy": ("plan", "config", "strategies", "python_file"),
    "rlhf_spmd.train_verb": (
        "plan",
        "config",
        "strategy",
        "cluster_file",
        "fitting",
        "check_verb",
        "plan_verb",
        "runtime",
    ),
}
# The same for other people's packages; None: any but those behind a fence.
OTHERS: dict[str, tuple[str, ...] | None] = {
    "rlhf_spmd": (),
    "rlhf_spmd.__main__": None,
    "rlhf_spmd.algorithms": ("pydantic",),
    "rlhf_spmd.algorithms.order": ("numpy",),
    "rlhf_spmd.calibration_file": ("pydantic",),
    "rlhf_spmd.cluster_file": ("pydantic",),
    "rlhf_spmd.config": ("pydantic",),
    "rlhf_spmd.embedded.make": None,
    "rlhf_spmd.kernels": None,
    "rlhf_spmd.model": None,
    "rlhf_spmd.model.config": (),
    "rlhf_spmd.plan": ("numpy",),
    "rlhf_spmd.rewards": ("vaderSentiment",),
    "rlhf_spmd.runtime": None,
}
FENCES = {
    "mpi4py": "rlhf_spmd.runtime.world",
    "deepspeed": "rlhf_spmd.runtime.train_engine",
    "transformers": "rlhf_spmd.model.hf",
    "triton": "rlhf_spmd.kernels",
    "wandb": "rlhf_spmd.runtime.curves",
}
LAZY = "rlhf_spmd.__main__"  # at module level it imports errors and the standard library, nothing else
NOT_PACKAGES = (
    "tests",
    "bench",
    "kernels",
    "strategies",
)  # folders of this repository that nobody imports by that name
NO_FILES = "rlhf_spmd.plan"
OPENERS = ("os", "io", "pathlib", "shutil", "tempfile", "glob", "fileinput", "subprocess", "socket", "mmap", "sqlite3")
OPENING = ("open", "load", "save", "loadtxt", "savetxt", "genfromtxt", "fromfile", "tofile", "memmap")
OPENING += ("read_text", "write_text", "read_bytes", "write_bytes")


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    late: bool  # inside a function


def modules_of(root: Path) -> dict[str, Path]:
    """Every module of the package by its dotted name; a package is named like its __init__."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


def imports_of(tree: ast.Module, module: str, is_package: bool, known: set[str]) -> Iterator[Import]:
    """All imports, also inside functions, under TYPE_CHECKING, relative, and by import_module("name")."""
    package = module if is_package else module.rpartition(".")[0]
    todo: list[tuple[ast.AST, bool]] = [(tree, False)]
    while todo:
        node, late = todo.pop()
        inside = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        todo += [(child, inside) for child in ast.iter_child_nodes(node)]
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield Import(inner if inner in known else base, node.lineno, late)
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__") and node.args:
            target = node.args[0]
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                yield Import(target.value, node.lineno, late)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def rule(table: dict, module: str):
    return table[max((name for name in table if within(module, name)), key=len)]


def import_problem(module: str, found: Import) -> str | None:
    """Why `module` may not import this; None if it may."""
    target, top = found.module, found.module.partition(".")[0]
    if within(target, "rlhf_spmd"):
        if module == LAZY and not found.late and target != "rlhf_spmd.errors":
            return f"imports {target} at module level; import it where it is used"
        allowed = ("errors",) if module.endswith("_math") else (*rule(OURS, module), "errors")
        if ANYTHING[0] in allowed or any(within(target, f"rlhf_spmd.{name}") for name in allowed):
            return None
        return f"may not import {target} (of ours only: {', '.join(sorted(allowed))})"
    if top in NOT_PACKAGES:
        return f"may not import {target}: nothing in the package does"
    if top in sys.stdlib_module_names:
        if within(module, NO_FILES) and top in OPENERS:
            return f"imports {target}, but {NO_FILES} opens no files"
        return None
    if module == LAZY and not found.late:
        return f"imports {target} at module level; import it where it is used"
    if top in FENCES:
        return None if within(module, FENCES[top]) else f"imports {top}, which only {FENCES[top]} may"
    others = None if module.endswith("_math") else rule(OTHERS, module)
    if others is not None and top not in others:
        return f"may not import {target} (of others only: {', '.join(others) or 'none'})"
    return None


def size_problems(path: Path, where: Path) -> list[str]:
    """What is too long in a file."""
    found, source = [], path.read_text()
    num_lines = len(source.splitlines())
    if num_lines > MAX_LINES:
        found.append(f"{where}: {num_lines} lines, at most {MAX_LINES}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION:
                found.append(f"{where}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION}")
    return found


def problems_of(root: Path) -> list[str]:
    """Everything in a tree that breaks a rule, one line each: path, line, what."""
    found = []
    modules = modules_of(root)
    beside = [path for folder in BESIDE for path in sorted((root / folder).rglob("*.py"))]
    for path in [*modules.values(), *beside]:
        found += size_problems(path, path.relative_to(root))
    for module, path in modules.items():
        where, tree = path.relative_to(root), ast.parse(path.read_text())
        for item in imports_of(tree, module, path.name == "__init__.py", set(modules)):
            problem = import_problem(module, item)
            found += [f"{where}:{item.line}: {problem}"] if problem else []
        for node in ast.walk(tree):
            if within(module, NO_FILES) and isinstance(node, ast.Call) and _name(node.func) in OPENING:
                found.append(f"{where}:{node.lineno}: calls {_name(node.func)}, but {NO_FILES} opens no files")
    return found


def test_this_repository():
    assert problems_of(ROOT) == []


def test_every_module_is_seen():
    modules = modules_of(ROOT)
    for module in ("rlhf_spmd", "rlhf_spmd.plan.check", "rlhf_spmd.kernels.philox", "rlhf_spmd.strategies.flattening"):
        assert module in modules


def test_a_run_on_a_cpu_imports_no_triton_and_no_deepspeed():
    """Which take a fifth of a second and seconds; a run that needs one imports it then."""
    code = "import sys, rlhf_spmd.runtime.train; print([n for n in ('triton', 'deepspeed') if n in sys.modules])"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# ---- the rules refuse what they should: a small tree that keeps them all, then one offence at a time -----------------

GOOD = {
    "rlhf_spmd/__init__.py": "",
    "rlhf_spmd/__main__.py": (
        "import sys\nfrom rlhf_spmd.errors import UserError\n"
        "def main():\n    import torch\n    from rlhf_spmd.runtime.world import World\n"
    ),
    "rlhf_spmd/errors.py": "class UserError(Exception): ...\n",
    "rlhf_spmd/config.py": (
        "from pathlib import Path\nimport pydantic\nfrom rlhf_spmd import errors\n"
        "from rlhf_spmd.algorithms.ppo import PPO\nfrom rlhf_spmd.model.config import from_hf\n"
    ),
    "rlhf_spmd/strategy.py": "import rlhf_spmd.strategies\nfrom rlhf_spmd.config import load\n",
    "rlhf_spmd/rewards.py": "def vader():\n    import vaderSentiment\n",
    "rlhf_spmd/algorithms/__init__.py": "",
    "rlhf_spmd/algorithms/ppo.py": "from rlhf_spmd.plan.layout import Layout\n",
    "rlhf_spmd/algorithms/ppo_math.py": "import torch\nfrom rlhf_spmd.errors import UserError\n",
    "rlhf_spmd/embedded/__init__.py": "",
    "rlhf_spmd/embedded/make.py": "from rlhf_spmd.runtime import world\n",
    "rlhf_spmd/model/__init__.py": "",
    "rlhf_spmd/model/config.py": "from rlhf_spmd.errors import UserError\n",
    "rlhf_spmd/model/hf.py": "import torch\ndef load():\n    import transformers\n",
    "rlhf_spmd/model/transformer.py": "from . import config\nfrom rlhf_spmd.kernels import philox\n",
    "rlhf_spmd/plan/__init__.py": "",
    "rlhf_spmd/plan/layout.py": "import re\nimport numpy as np\n",
    "rlhf_spmd/plan/check.py": "from .layout import Layout\n",
    "rlhf_spmd/runtime/__init__.py": "",
    "rlhf_spmd/runtime/train_engine.py": "def step():\n    import deepspeed\n",
    "rlhf_spmd/runtime/world.py": "from mpi4py import MPI\nfrom rlhf_spmd.config import load\n",
    "kernels/__init__.py": "",
    "kernels/philox.py": "import triton.language as tl\n",
    "strategies/__init__.py": "",
    "strategies/flattening.py": "from rlhf_spmd.plan.layout import Layout\n",
    "tests/unit/test_x.py": "import deepspeed\nfrom bench import rows\n",
    "bench/__init__.py": "",
    "bench/scan.py": "from tests import folders\nfrom rlhf_spmd.runtime import world\n",
}
LONG = "def long():\n" + "    x = 1\n" * MAX_FUNCTION
OFFENCES = [
    # arrows
    ("rlhf_spmd/errors.py", "import rlhf_spmd.config", "may not import rlhf_spmd.config"),
    ("rlhf_spmd/__init__.py", "from rlhf_spmd.plan import layout", "may not import rlhf_spmd.plan.layout"),
    ("rlhf_spmd/plan/check.py", "from rlhf_spmd.config import load", "may not import rlhf_spmd.config"),
    ("rlhf_spmd/plan/check.py", "from rlhf_spmd import config", "may not import rlhf_spmd.config"),
    ("rlhf_spmd/plan/check.py", "from ..algorithms import ppo", "may not import rlhf_spmd.algorithms.ppo"),
    ("rlhf_spmd/plan/__init__.py", "from ..model.config import from_hf", "may not import rlhf_spmd.model.config"),
    ("rlhf_spmd/config.py", "from rlhf_spmd.model.transformer import x", "may not import rlhf_spmd.model.transformer"),
    ("rlhf_spmd/config.py", "from rlhf_spmd.strategy import load_strategy", "may not import rlhf_spmd.strategy"),
    ("rlhf_spmd/config.py", "def f():\n    import rlhf_spmd.runtime.world", "may not import rlhf_spmd.runtime.world"),
    ("rlhf_spmd/strategy.py", "from rlhf_spmd.runtime import world", "may not import rlhf_spmd.runtime.world"),
    ("strategies/flattening.py", "from rlhf_spmd.config import load", "may not import rlhf_spmd.config"),
    ("strategies/flattening.py", "from rlhf_spmd.strategy import names", "may not import rlhf_spmd.strategy"),
    ("rlhf_spmd/algorithms/ppo.py", "from rlhf_spmd.config import load", "may not import rlhf_spmd.config"),
    ("rlhf_spmd/algorithms/ppo_math.py", "from rlhf_spmd.plan import layout", "may not import rlhf_spmd.plan.layout"),
    ("kernels/philox.py", "from rlhf_spmd.model.config import x", "may not import rlhf_spmd.model.config"),
    ("rlhf_spmd/model/hf.py", "from rlhf_spmd.plan.layout import x", "may not import rlhf_spmd.plan.layout"),
    ("rlhf_spmd/model/config.py", "from rlhf_spmd.model import hf", "may not import rlhf_spmd.model.hf"),
    ("rlhf_spmd/runtime/world.py", "import rlhf_spmd.strategies", "may not import rlhf_spmd.strategies"),
    ("rlhf_spmd/runtime/world.py", "from rlhf_spmd.__main__ import main", "may not import rlhf_spmd.__main__"),
    ("rlhf_spmd/embedded/__init__.py", "from rlhf_spmd.config import x", "may not import rlhf_spmd.config"),
    ("rlhf_spmd/rewards.py", "from rlhf_spmd.runtime import world", "may not import rlhf_spmd.runtime.world"),
    ("rlhf_spmd/newcomer.py", "from rlhf_spmd.plan.layout import x", "may not import rlhf_spmd.plan.layout"),
    ("rlhf_spmd/runtime/world.py", "from tests import folders", "may not import tests"),
    ("rlhf_spmd/runtime/world.py", "import bench.scan", "may not import bench.scan"),
    ("rlhf_spmd/model/hf.py", "from kernels import philox", "may not import kernels"),
    # the same, hidden
    (
        "rlhf_spmd/plan/check.py",
        "if TYPE_CHECKING:\n    import rlhf_spmd.config",
        "may not import rlhf_spmd.config",
    ),
    ("rlhf_spmd/plan/check.py", "import_module('rlhf_spmd.config')", "may not import rlhf_spmd.config"),
    ("rlhf_spmd/plan/check.py", "class A:\n    def f(self):\n        __import__('torch')", "may not import torch"),
    # fences
    ("rlhf_spmd/runtime/train_engine.py", "from mpi4py import MPI", "only rlhf_spmd.runtime.world may"),
    ("rlhf_spmd/__main__.py", "def f():\n    import mpi4py.MPI", "only rlhf_spmd.runtime.world may"),
    ("rlhf_spmd/runtime/world.py", "def f():\n    import deepspeed", "only rlhf_spmd.runtime.train_engine may"),
    ("rlhf_spmd/runtime/world.py", "from deepspeed.runtime import engine", "only rlhf_spmd.runtime.train_engine may"),
    ("rlhf_spmd/model/transformer.py", "import transformers", "only rlhf_spmd.model.hf may"),
    ("rlhf_spmd/embedded/make.py", "import transformers", "only rlhf_spmd.model.hf may"),
    ("rlhf_spmd/model/transformer.py", "import triton", "only rlhf_spmd.kernels may"),
    # light modules
    ("rlhf_spmd/plan/layout.py", "import torch", "may not import torch"),
    ("rlhf_spmd/plan/layout.py", "import pydantic", "may not import pydantic"),
    ("rlhf_spmd/config.py", "def f():\n    import torch", "may not import torch"),
    ("rlhf_spmd/model/config.py", "import torch", "may not import torch"),
    ("rlhf_spmd/model/__init__.py", "from rlhf_spmd.plan import layout", "may not import rlhf_spmd.plan.layout"),
    ("strategies/flattening.py", "import numpy", "may not import numpy"),
    ("rlhf_spmd/__main__.py", "from rlhf_spmd import config", "at module level"),
    ("rlhf_spmd/__main__.py", "import torch", "at module level"),
    ("rlhf_spmd/__main__.py", "try:\n    import numpy\nexcept ImportError:\n    pass", "at module level"),
    # files
    ("rlhf_spmd/plan/layout.py", "import os", "opens no files"),
    ("rlhf_spmd/plan/layout.py", "from pathlib import Path", "opens no files"),
    ("rlhf_spmd/plan/layout.py", "x = open('x')", "opens no files"),
    ("rlhf_spmd/plan/layout.py", "x = np.load('x')", "opens no files"),
    # sizes
    ("rlhf_spmd/runtime/world.py", "# a line\n" * (MAX_LINES + 1), "at most 399"),
    ("strategies/flattening.py", LONG, "at most 80"),
    ("tests/unit/test_x.py", "# a line\n" * (MAX_LINES + 1), "at most 399"),
    ("bench/scan.py", "# a line\n" * (MAX_LINES + 1), "at most 399"),
    ("bench/scan.py", LONG, "at most 80"),
    ("kernels/philox.py", "class A:\n" + LONG.replace("\n", "\n    ").replace("def", "    def", 1), "at most 80"),
]


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source)


def test_a_tree_that_keeps_the_rules_passes(tmp_path):
    write_tree(tmp_path, GOOD)
    assert problems_of(tmp_path) == []


@pytest.mark.parametrize(("name", "source", "problem"), OFFENCES, ids=[f"{o[0]}: {o[1][:40]}" for o in OFFENCES])
def test_an_offence_is_found(tmp_path, name, source, problem):
    write_tree(tmp_path, GOOD | {name: GOOD.get(name, "") + source + "\n"})
    found = problems_of(tmp_path)
    assert len(found) == 1 and problem in found[0] and found[0].startswith(name), found
