"""`python -m rlhf_spmd draw`: what it draws, of any strategy and any workflow, and what it refuses."""

import json
import subprocess
import sys

from rlhf_spmd.__main__ import main
from rlhf_spmd.command_line.fitting_strategies import compile_all
from rlhf_spmd.config.presets import load
from rlhf_spmd.plan.cluster import Cluster
from tests.programs import make_workload
from tests.unit.verbs.test_check import HEAVY

MINE = """from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement


def place(workload, cluster, *, tp: int = 1):
    layout = Layout.grid_of(cluster.ranks, tp=tp)
    return Placement({call.name: layout for call in workload.workflow.placed_calls})
"""
SMALL = ("rollout_batch=16", "mini_batch=16")


def draw(*arguments: str) -> int:
    return main(["draw", *arguments, *SMALL])


# ---- what is drawn ---------------------------------------------------------------------------------------------------


def test_maps_and_forecasts_without_torch_and_mpi(tmp_path):
    mine, out = tmp_path / "mine.py", tmp_path / "pictures" / "all.png"
    mine.write_text(MINE, encoding="utf-8")
    command = ["draw", "separation", str(mine), "--layout", "1x4", "--out", str(out), "strategy.tp=2", *SMALL]
    code = f"import sys; from rlhf_spmd.__main__ import main; assert main({command!r}) == 0; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    *_, last, modules = done.stdout.splitlines()
    assert {name.partition(".")[0] for name in modules.split()} & HEAVY <= {"matplotlib", "tokenizers"}
    result = json.loads(last)
    assert result["ok"] and result["strategies"] == ["separation", str(mine)] == list(result["forecast_s"])
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 20_000


def test_strategies_get_the_options_that_they_have():
    config = load("tiny", ["strategy.training_pp=2", "strategy.zero=1"])
    cluster, workload = Cluster.parse("1x4"), make_workload()
    programs = compile_all(["flattening", "separation"], workload, cluster, config.strategy)
    assert programs["separation"].placement.layouts["actor_train"].pp == 2
    assert {program.placement.layouts["actor_train"].zero for program in programs.values()} == {1}


# ---- what is refused -------------------------------------------------------------------------------------------------
