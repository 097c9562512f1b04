"""The profile verb on one rank: what it measures comes back from its file, and forecasts are made of it."""

import dataclasses
import os

import torch

from rlhf_spmd.config import presets
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.machines.calibration_file import read_calibration, write_calibration
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.runtime.profile.measured_sizes import Grid
from rlhf_spmd.runtime.profile.profile import between_ranks, groups_of, inside_ranks, profile, summary

TOY = Grid(max_prompt=4, max_response=4, shares=(1.0,), most_rows=2, most_places=2, tps=(1,))


@dataclasses.dataclass
class Nodes:
    """Where ranks are."""

    nodes: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.nodes)

    @property
    def num_nodes(self) -> int:
        return len(set(self.nodes))


def test_groups_are_inside_a_node_or_between_nodes():
    nodes = Nodes((0,) * 6 + (1,) * 6)
    assert inside_ranks(nodes) == [(0, 1), (0, 1, 2, 3), (0, 1, 2, 3, 4, 5)]
    assert between_ranks(nodes) == [(0, 6)]
    named = groups_of(nodes, (1, 2))
    assert named["ranks 0-5"] == (0, 1, 2, 3, 4, 5) and named["ranks 10-11"] == (10, 11)
    assert inside_ranks(Nodes((0,))) == between_ranks(Nodes((0, 0))) == []


def test_a_profile_becomes_forecasts(world, tmp_path, capfd):
    config = presets.load("tiny")
    found = profile(world, config, name="mine", grid=TOY, budget_s=0.0)
    assert capfd.readouterr() == ("", "")  # progress is shown where the program has begun to show it
    path = tmp_path / "mine.json"
    write_calibration(found, str(path))
    read = read_calibration(str(path))
    workers = max(1, len(os.sched_getaffinity(0)) // torch.get_num_threads())
    assert read.devices["cpu"].num_workers == workers and "tiny" in read.provenance
    tables = {one.shape.scalar_head: one for one in read.devices["cpu"].measured}
    assert set(tables) == {False, True} and tables[False].decode and not tables[True].decode
    assert tables[False].forward.lengths == (8.0,) and tables[False].decode.layer.amounts == (1.0, 2.0)
    assert "lm head, tp 1" in summary(read)
    program = load_strategy("flattening").compile(make_workload(config), Cluster.parse("1x2"), {})
    assert forecast(program, read).makespan_s > 0
