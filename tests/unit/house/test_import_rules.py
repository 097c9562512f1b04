"""This repository keeps the rules of the house (tests/import_rules.py), and the rules refuse what they should."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.coverage_rules import coverage_problems
from tests.import_rules import (
    MAX_FILES,
    ROOT,
    folder_problems,
    modules_of,
    problems_of,
)

WORLD = "rlhf_spmd/runtime/world/world.py"
DEEPSPEED = "rlhf_spmd/runtime/engines/deepspeed_engine.py"
CHECK = "rlhf_spmd/plan/proof/check.py"
PAGE, ADVANTAGES = "rlhf_spmd/algorithms/ppo.py", "rlhf_spmd/algorithms/advantages.py"


def test_this_repository():
    assert problems_of(ROOT) == []


def test_every_module_of_this_repository_has_a_test_file():
    assert list(coverage_problems(ROOT)) == []


def test_large_folders_and_loose_files():
    files = [Path(f"rlhf_spmd/plan/{number}.py") for number in range(MAX_FILES)]
    assert folder_problems([*files, Path("rlhf_spmd/plan/__init__.py")]) == []
    assert folder_problems([*files, Path("rlhf_spmd/plan/x.py")]) == ["rlhf_spmd/plan: 13 files, at most 12"]
    assert folder_problems([Path(f"kernels/{number}.py") for number in range(50)]) == []
    assert folder_problems([Path("rlhf_spmd/x.py")]) == ["rlhf_spmd/x.py: lies loose; put it into its room"]


def test_every_module_is_seen():
    modules = modules_of(ROOT)
    for module in (
        "rlhf_spmd",
        "rlhf_spmd.plan.proof.check",
        "rlhf_spmd.kernels.philox",
        "rlhf_spmd.strategies.flattening",
    ):
        assert module in modules


def test_a_run_on_a_cpu_imports_no_triton_and_no_deepspeed():
    """Which take a fifth of a second and seconds; a run that needs one imports it then."""
    code = "import sys, rlhf_spmd.runtime.run.train; print([n for n in ('triton', 'deepspeed') if n in sys.modules])"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, encoding="utf-8", check=True
    )
    assert done.stdout == "[]\n"


# ---- the rules refuse what they should: a small tree that keeps them all, then one offence at a time -----------------

GOOD = {
    "rlhf_spmd/__init__.py": "",
    "rlhf_spmd/__main__.py": (
        "import sys\nfrom rlhf_spmd.errors import UserError\n"
        "def main():\n    import torch\n    from rlhf_spmd.runtime.world.world import World\n"
    ),
    "rlhf_spmd/errors.py": "class UserError(Exception): ...\n",
    "rlhf_spmd/config/options.py": (
        "from pathlib import Path\nimport pydantic\nfrom rlhf_spmd import errors\n"
        "from rlhf_spmd.pages.algorithm import load_algorithm\nfrom rlhf_spmd.algorithms.page import Options\n"
    ),
    "rlhf_spmd/pages/algorithm.py": "from rlhf_spmd.algorithms import page\nfrom rlhf_spmd.plan.layout import Layout\n",
    "rlhf_spmd/config/model_folders.py": (
        "from rlhf_spmd.model.config import x\nfrom rlhf_spmd.plan.layout import Layout\n"
    ),
    "rlhf_spmd/config/presets.py": (
        "from rlhf_spmd import embedded\nfrom rlhf_spmd.config import options\nfrom rlhf_spmd.pages import algorithm\n"
        "from rlhf_spmd.model.config import x\n"
    ),
    "rlhf_spmd/pages/strategy.py": "import rlhf_spmd.strategies\nfrom rlhf_spmd.pages.user_module import x\n",
    "rlhf_spmd/rewards.py": "def vader():\n    import vaderSentiment\n",
    "rlhf_spmd/algorithms/__init__.py": "",
    "rlhf_spmd/algorithms/page.py": "from pydantic import PositiveInt\n",
    "rlhf_spmd/algorithms/controllers.py": "import math\n",
    "rlhf_spmd/algorithms/masks.py": "import torch\n",
    ADVANTAGES: "import torch\nfrom rlhf_spmd.algorithms import controllers, masks\n",
    "rlhf_spmd/algorithms/surrogates.py": "import torch\nfrom rlhf_spmd.algorithms.advantages import x\n",
    PAGE: "from rlhf_spmd.algorithms import controllers, page\nfrom rlhf_spmd.plan.layout import Layout\n",
    "rlhf_spmd/embedded/__init__.py": "",
    "rlhf_spmd/model/__init__.py": "",
    "rlhf_spmd/model/config.py": "from rlhf_spmd.errors import UserError\n",
    "rlhf_spmd/model/hf.py": "import torch\ndef load():\n    import transformers\n",
    "rlhf_spmd/model/transformer.py": "from . import config\nfrom rlhf_spmd.kernels import philox\n",
    "rlhf_spmd/plan/__init__.py": "",
    "rlhf_spmd/plan/cluster.py": "from . import layout\n",
    "rlhf_spmd/plan/layout.py": "import re\nimport numpy as np\n",
    CHECK: "from ..layout import Layout\n",
    "rlhf_spmd/runtime/__init__.py": "",
    DEEPSPEED: "def step():\n    import deepspeed\n",
    "rlhf_spmd/runtime/world/trace.py": "import time\n",
    "rlhf_spmd/runtime/world/metric_sums.py": "from rlhf_spmd.runtime.world import trace\n",
    WORLD: (
        "from mpi4py import MPI\nfrom rlhf_spmd.runtime.world.trace import x\n"
        "os.open('x', os.O_RDONLY)\npath.open('rb')\nopen('x', 'w', encoding='utf-8')\ntempfile.TemporaryFile()\n"
        "connection.makefile('rb')\nload(text='x')\n"
    ),
    "rlhf_spmd/runtime/run/train.py": (
        "from rlhf_spmd.runtime.world.world import World\nfrom rlhf_spmd.pages import algorithm\n"
    ),
    "kernels/__init__.py": "",
    "kernels/philox.py": "import triton.language as tl\n",
    "strategies/__init__.py": "",
    "strategies/flattening.py": "from rlhf_spmd.plan.layout import Layout\n",
    "tests/unit/test_x.py": "import deepspeed\nfrom bench import rows\n",
    "bench/__init__.py": "",
    "bench/rows.py": "",
    "bench/speed/kernels.py": "from bench.rows import write\n",
    "bench/forecast/scan.py": "from tests import folders\nimport rlhf_spmd.config.options\nfrom bench import rows\n",
}
OFFENCES = [
    # arrows
    ("rlhf_spmd/errors.py", "import rlhf_spmd.config.options", "may not import rlhf_spmd.config.options"),
    ("rlhf_spmd/__init__.py", "from rlhf_spmd.plan import layout", "may not import rlhf_spmd.plan.layout"),
    (CHECK, "from rlhf_spmd.config.options import load", "may not import rlhf_spmd.config.options"),
    (CHECK, "from rlhf_spmd.config import options", "may not import rlhf_spmd.config.options"),
    (CHECK, "from ...algorithms import ppo", "may not import rlhf_spmd.algorithms.ppo"),
    ("rlhf_spmd/plan/__init__.py", "from ..model.config import from_hf", "may not import rlhf_spmd.model.config"),
    (
        "rlhf_spmd/config/options.py",
        "from rlhf_spmd.model.transformer import x",
        "may not import rlhf_spmd.model.transformer",
    ),
    (
        "rlhf_spmd/config/options.py",
        "from rlhf_spmd.pages.strategy import load_strategy",
        "may not import rlhf_spmd.pages.strategy",
    ),
    (
        "rlhf_spmd/config/options.py",
        "def f():\n    import rlhf_spmd.runtime.world",
        "may not import rlhf_spmd.runtime.world",
    ),
    (
        "rlhf_spmd/pages/strategy.py",
        "from rlhf_spmd.runtime import world",
        "may not import rlhf_spmd.runtime",
    ),
    (
        "strategies/flattening.py",
        "from rlhf_spmd.config.options import load",
        "may not import rlhf_spmd.config.options",
    ),
    (
        "strategies/flattening.py",
        "from rlhf_spmd.pages.strategy import strategy_names",
        "may not import rlhf_spmd.pages.strategy",
    ),
    (PAGE, "from rlhf_spmd.config.options import load", "may not import rlhf_spmd.config.options"),
    (PAGE, "from rlhf_spmd.algorithms import surrogates", "may not import rlhf_spmd.algorithms.surrogates"),
    (PAGE, "from rlhf_spmd.pages.algorithm import load_algorithm", "may not import rlhf_spmd.pages.algorithm"),
    (ADVANTAGES, "from rlhf_spmd.plan import layout", "may not import rlhf_spmd.plan.layout"),
    (ADVANTAGES, "from rlhf_spmd.algorithms import ppo", "may not import rlhf_spmd.algorithms.ppo"),
    (ADVANTAGES, "from rlhf_spmd.algorithms import page", "may not import rlhf_spmd.algorithms.page"),
    (ADVANTAGES, "from rlhf_spmd.model.hf import load", "may not import rlhf_spmd.model.hf"),
    (
        "rlhf_spmd/algorithms/controllers.py",
        "from rlhf_spmd.algorithms import masks",
        "may not import rlhf_spmd.algorithms.masks",
    ),
    ("rlhf_spmd/algorithms/page.py", "from rlhf_spmd.plan import layout", "may not import rlhf_spmd.plan.layout"),
    ("rlhf_spmd/pages/algorithm.py", "from rlhf_spmd.algorithms import ppo", "may not import rlhf_spmd.algorithms.ppo"),
    (
        "rlhf_spmd/pages/algorithm.py",
        "from rlhf_spmd.config.options import x",
        "may not import rlhf_spmd.config.options",
    ),
    (
        "rlhf_spmd/config/options.py",
        "from rlhf_spmd.config.presets import load",
        "may not import rlhf_spmd.config.presets",
    ),
    (
        "rlhf_spmd/config/options.py",
        "from rlhf_spmd.algorithms.ppo import Options",
        "may not import rlhf_spmd.algorithms.ppo",
    ),
    (
        "rlhf_spmd/config/model_folders.py",
        "from rlhf_spmd.config.options import x",
        "may not import rlhf_spmd.config.options",
    ),
    (CHECK, "from rlhf_spmd.pages.algorithm import bound", "may not import rlhf_spmd.pages.algorithm"),
    ("strategies/flattening.py", "from rlhf_spmd.pages import algorithm", "may not import rlhf_spmd.pages.algorithm"),
    (WORLD, "from rlhf_spmd.pages.algorithm import bound", "may not import rlhf_spmd.pages.algorithm"),
    ("kernels/philox.py", "from rlhf_spmd.model.config import x", "may not import rlhf_spmd.model.config"),
    ("rlhf_spmd/model/hf.py", "from rlhf_spmd.plan.layout import x", "may not import rlhf_spmd.plan.layout"),
    ("rlhf_spmd/model/config.py", "from rlhf_spmd.model import hf", "may not import rlhf_spmd.model.hf"),
    (WORLD, "import rlhf_spmd.strategies", "may not import rlhf_spmd.strategies"),
    (WORLD, "from rlhf_spmd.__main__ import main", "may not import rlhf_spmd.__main__"),
    (
        "rlhf_spmd/embedded/__init__.py",
        "from rlhf_spmd.config.options import x",
        "may not import rlhf_spmd.config.options",
    ),
    (
        "rlhf_spmd/rewards.py",
        "from rlhf_spmd.runtime import world",
        "may not import rlhf_spmd.runtime",
    ),
    ("rlhf_spmd/newcomer.py", "from rlhf_spmd.plan.layout import x", "may not import rlhf_spmd.plan.layout"),
    (WORLD, "from tests import folders", "may not import tests"),
    (WORLD, "import bench.scan", "may not import bench.scan"),
    ("rlhf_spmd/model/hf.py", "from kernels import philox", "may not import kernels"),
    # rooms
    (
        "rlhf_spmd/runtime/world/trace.py",
        "from rlhf_spmd.model.config import x",
        "may not import rlhf_spmd.model.config",
    ),
    (
        "rlhf_spmd/runtime/world/trace.py",
        "def f():\n    from rlhf_spmd.runtime.run import train",
        "may not import rlhf_spmd.runtime.run.train",
    ),
    (
        WORLD,
        "if TYPE_CHECKING:\n    from rlhf_spmd.runtime.run.train import Job",
        "may not import rlhf_spmd.runtime.run.train",
    ),
    ("rlhf_spmd/plan/layout.py", "from .proof import check", "may not import rlhf_spmd.plan.proof.check"),
    ("bench/rows.py", "from bench.speed import kernels", "may not import bench.speed.kernels"),
    ("bench/speed/kernels.py", "import bench.forecast.scan", "may not import bench.forecast.scan"),
    # circles
    ("rlhf_spmd/runtime/world/trace.py", "def f():\n    from . import metric_sums", "a circle of imports"),
    (
        "rlhf_spmd/plan/layout.py",
        "if TYPE_CHECKING:\n    from rlhf_spmd.plan import cluster",
        "a circle of imports: rlhf_spmd.plan.layout -> rlhf_spmd.plan.cluster -> rlhf_spmd.plan.layout",
    ),
    # the same, hidden
    (
        CHECK,
        "if TYPE_CHECKING:\n    import rlhf_spmd.config.options",
        "may not import rlhf_spmd.config.options",
    ),
    (CHECK, "import_module('rlhf_spmd.config.options')", "may not import rlhf_spmd.config.options"),
    (
        CHECK,
        "class A:\n    def f(self):\n        __import__('torch')",
        "may not import torch",
    ),
    # fences
    (
        DEEPSPEED,
        "from mpi4py import MPI",
        "only rlhf_spmd.runtime.world.world",
    ),
    ("rlhf_spmd/__main__.py", "def f():\n    import mpi4py.MPI", "only rlhf_spmd.runtime.world.world"),
    (
        WORLD,
        "def f():\n    import deepspeed",
        "only rlhf_spmd.runtime.engines.deepspeed_engine",
    ),
    (
        WORLD,
        "from deepspeed.runtime import engine",
        "only rlhf_spmd.runtime.engines.deepspeed_engine",
    ),
    ("rlhf_spmd/model/transformer.py", "import transformers", "only rlhf_spmd.model.hf may"),
    ("rlhf_spmd/model/transformer.py", "import triton", "only rlhf_spmd.kernels may"),
    # light modules
    ("rlhf_spmd/plan/layout.py", "import torch", "may not import torch"),
    ("rlhf_spmd/plan/layout.py", "import pydantic", "may not import pydantic"),
    ("rlhf_spmd/config/options.py", "def f():\n    import torch", "may not import torch"),
    ("rlhf_spmd/model/config.py", "import torch", "may not import torch"),
    ("rlhf_spmd/model/__init__.py", "from rlhf_spmd.plan import layout", "may not import rlhf_spmd.plan.layout"),
    ("strategies/flattening.py", "import numpy", "may not import numpy"),
    ("rlhf_spmd/__main__.py", "from rlhf_spmd.config import options", "at module level"),
    ("rlhf_spmd/__main__.py", "import torch", "at module level"),
    ("rlhf_spmd/__main__.py", "try:\n    import numpy\nexcept ImportError:\n    pass", "at module level"),
    (PAGE, "import torch", "may not import torch"),
    (PAGE, "def f():\n    import numpy", "may not import numpy"),
    ("rlhf_spmd/algorithms/page.py", "import torch", "may not import torch"),
    ("rlhf_spmd/algorithms/controllers.py", "import torch", "may not import torch"),
    ("rlhf_spmd/pages/algorithm.py", "import torch", "may not import torch"),
    ("rlhf_spmd/config/presets.py", "import torch", "may not import torch"),
    (ADVANTAGES, "import numpy", "may not import numpy"),
    # files
    ("rlhf_spmd/plan/layout.py", "import os", "opens no files"),
    ("rlhf_spmd/plan/layout.py", "from pathlib import Path", "opens no files"),
    ("rlhf_spmd/plan/layout.py", "x = open('x')", "opens no files"),
    ("rlhf_spmd/plan/layout.py", "x = np.load('x')", "opens no files"),
    # text files
    (WORLD, "open('x')", "open without an encoding"),
    (WORLD, "path.open('a')", "open without an encoding"),
    (WORLD, "path.open(mode='x', errors='replace')", "open without an encoding"),
    (WORLD, "io.open('x', 'r')", "open without an encoding"),
    (WORLD, "os.fdopen(1, 'w')", "fdopen without an encoding"),
    (WORLD, "def f():\n    return path.read_text(errors='replace')", "read_text without an encoding"),
    ("kernels/philox.py", "path.write_text('x')", "write_text without an encoding"),
    (WORLD, "connection.makefile()", "makefile without an encoding"),
    (WORLD, "tempfile.NamedTemporaryFile('w')", "NamedTemporaryFile without an encoding"),
    ("bench/rows.py", "subprocess.run(command, text=True)", "run without an encoding"),
    ("tests/unit/test_x.py", "path.read_text()", "read_text without an encoding"),
    (WORLD, "path.read_text(encoding='utf-8').splitlines()", 'split at "\\n"'),
    # words
    (WORLD, "def f(step: Run | None):\n    pass", "a parameter of the type Run | None is named run, not step"),
    ("kernels/philox.py", "def f(*, run: Path):\n    pass", "a parameter run is of the type Run or RunFiles, not Path"),
]


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source, encoding="utf-8")


def test_a_tree_that_keeps_the_rules_passes(tmp_path):
    write_tree(tmp_path, GOOD)
    assert problems_of(tmp_path) == []


@pytest.mark.parametrize(("name", "source", "problem"), OFFENCES, ids=[f"{o[0]}: {o[1][:40]}" for o in OFFENCES])
def test_an_offence_is_found(tmp_path, name, source, problem):
    write_tree(tmp_path, GOOD | {name: GOOD.get(name, "") + source + "\n"})
    found = problems_of(tmp_path)
    assert any(problem in line and line.startswith(name) for line in found), found
    assert all(line.startswith(name) or "a circle of imports" in line for line in found), found


MODULES = ("rlhf_spmd/plan/a.py", "rlhf_spmd/plan/b.py", "rlhf_spmd/verbs/run.py", "strategies/page.py")
COVERED = {
    **dict.fromkeys(MODULES, ""),
    **{f"{folder}/__init__.py": "" for folder in ("rlhf_spmd", "rlhf_spmd/plan", "rlhf_spmd/verbs", "strategies")},
    "rlhf_spmd/__main__.py": "from rlhf_spmd.verbs import run\n",
    "rlhf_spmd/plan/a.py": "from rlhf_spmd.plan import b\n",
    "tests/helper.py": "from rlhf_spmd.plan import a\n",
    "tests/unit/plan/test_a.py": "from tests import helper\n",
    "tests/e2e/test_run.py": "start('rlhf_spmd', 'run', '--strategy=page')\n",
}
LINES = {"unit/plan/test_a.py": ("plan.b",), "e2e/test_run.py": ("__main__", "strategies.page")}


@pytest.mark.parametrize(
    ("files", "lines", "problem"),
    [
        ({}, LINES, None),
        (
            {"rlhf_spmd/plan/c.py": ""},
            LINES,
            "plan/c.py: has no test file tests/unit/plan/test_c.py",
        ),
        ({"tests/unit/plan/test_a.py": '"""rlhf_spmd.plan.a"""'}, LINES, "plan/a.py: has no test file"),
        (
            {"tests/unit/plan/test_b.py": "import rlhf_spmd.plan.b"},
            LINES,
            "plan/b.py: has the test file unit/plan",
        ),
        ({"rlhf_spmd/plan/a.py": ""}, LINES, "plan/b.py: tests/unit/plan/test_a.py of COVERS neither imports nor runs"),
        ({"tests/e2e/test_run.py": "start('rlhf_spmd', 'page')"}, LINES, "verbs/run.py: has no test file"),
        ({}, LINES | {"unit/test_b.py": ("plan.b",)}, "plan/b.py: tests/unit/test_b.py of COVERS does not exist"),
        ({}, LINES | {"unit/test_x.py": ("plan.x",)}, "COVERS names rlhf_spmd.plan.x"),
        ({"tests/unit/nowhere/test_x.py": ""}, LINES, "tests/unit/nowhere/test_x.py: there is no room nowhere"),
    ],
)
def test_a_module_without_its_test_file_is_found(files, lines, problem, tmp_path):
    write_tree(tmp_path, COVERED | files)
    found = list(coverage_problems(tmp_path, lines))
    assert (found == []) if problem is None else any(problem in line for line in found), found
