"""Emitted strategy modules: loading one gives the placement back, and it reads as if a person had written it."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.strategy import load_strategy, strategy_names
from rlhf_spmd.plan.cluster import Cluster, Node
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.text.strategy_module import strategy_source
from tests.programs import make_workload, random_plan

ROOT = Path(__file__).parents[4]
WORKLOAD = make_workload(mini_batch=8)
CALLS = [call.name for call in WORKLOAD.workflow.placed_calls]


def loaded(source: str, folder: Path, name: str = "plan"):
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    return load_strategy(str(path))


def assert_tidy(path: Path) -> None:
    """Asserts that a file is tidy, as `make lint` would have it."""
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    for command in (["check"], ["format", "--diff"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *config, str(path)],
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr + path.read_text(encoding="utf-8")


def one_layout(layout: Layout, **options) -> Placement:
    return Placement(dict.fromkeys(CALLS, layout), **options)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_placement_comes_back(data, tmp_path_factory):
    def choose(options):
        return data.draw(st.sampled_from(list(options)))

    workload, placement, cluster = random_plan(choose)
    micro_batch, recompute = choose([None, 1, 4]), choose([False, True])
    layouts = {
        name: replace(layout, micro_batch=micro_batch, recompute=recompute and name == "actor_train")
        for name, layout in placement.layouts.items()
    }
    placement = replace(placement, layouts=layouts, chain=choose([False, True]))
    source = strategy_source(placement, workload, cluster, 'A plan.\n\nWith "quotes", \\ and """more"""')
    found = loaded(source, tmp_path_factory.getbasetemp()).place(workload, cluster)
    assert found == placement and list(found.layouts) == list(placement.layouts)
    assert ("chain=True" in source) == placement.chain


@pytest.mark.parametrize("name", [name for name in strategy_names() if name != "auto"])
@pytest.mark.parametrize("layout", ["2x2", "2x8"])
def test_the_shipped_strategies_come_back(name, layout, tmp_path):
    cluster = Cluster.parse(layout)
    if name == "heterogeneous":
        cluster = Cluster((Node(cluster.num_devices // 2, "a100-80g"), Node(cluster.num_devices // 2, "h100-80g")))
    placement = load_strategy(name).place(WORKLOAD, cluster)
    source = strategy_source(placement, WORKLOAD, cluster, "A plan.")
    again = loaded(source, tmp_path).compile(WORKLOAD, cluster, {})
    assert again.placement == placement
    assert again.fingerprint == compile_program(WORKLOAD, placement, cluster).fingerprint
    assert_tidy(tmp_path / "plan.py")
    assert max(map(len, source.splitlines())) <= 120


def test_another_number_of_ranks_is_refused(tmp_path):
    cluster = Cluster.parse("1x4")
    source = strategy_source(one_layout(Layout.grid_of(range(4), tp=1)), WORKLOAD, cluster, "A plan.")
    strategy = loaded(source, tmp_path)
    with pytest.raises(UserError, match="for 4 ranks, and this cluster has 8; start as many, or plan again"):
        strategy.compile(WORKLOAD, Cluster.parse("1x8"), {})
    assert strategy.place(WORKLOAD, Cluster.parse("2x2")) == one_layout(Layout.grid_of(range(4)))
