"""Where no placement fits: the least memory that is found, the options to lower, and that it ends within the budget."""

from dataclasses import replace

import pytest

from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.errors import UserError
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.memory import peak_bytes, static_bytes, working_bytes
from rlhf_spmd.plan.cost.seconds import Cost
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.search.budget import Budget
from rlhf_spmd.plan.search.exact import Space
from rlhf_spmd.plan.search.iteration_model import CallModel
from rlhf_spmd.plan.search.misfit import roomiest
from rlhf_spmd.plan.search.planner import search

A100 = load_calibration("a100-80g")
BUDGET = 600_000  # steps, eight seconds


def refused(preset: str, cluster: Cluster, *overrides: str, method: str = "exact") -> str:
    """Returns the message of a search that finds nothing."""
    with pytest.raises(UserError) as error:
        search(make_workload(load(preset, overrides)), cluster, A100, method=method, budget=BUDGET)
    return str(error.value)


def test_what_was_proved_is_said():
    text = refused("llama-70b", Cluster.parse("1x4", "a100-80g"))
    assert text.startswith("no placement of this workload fits 1x4: all were considered")
    text = refused("llama-70b", Cluster.parse("1x4", "a100-80g"), method="two_phase")
    assert "that fits" in text and "was found (" in text


def test_the_least_memory_is_that_of_its_program():
    workload, cluster = make_workload(load("llama-33b")), Cluster.parse("1x8", "a100-80g")
    space = Space.of(CallModel(Cost(A100, workload, cluster)))
    chosen = roomiest(space, Budget())
    program = compile_program(workload, space.model.placement(chosen), cluster)
    need = max(peak_bytes(static_bytes(program, rank), working_bytes(program, rank)) for rank in cluster.ranks)
    assert need == pytest.approx(space.model.excess_bytes(chosen) + cluster.usable_bytes(0), rel=0.02)
    larger = Cluster(tuple(replace(node, device_bytes=int(need / 0.94) + 2**30) for node in cluster.nodes))
    space = Space.of(CallModel(Cost(A100, workload, larger)))
    assert space.model.excess_bytes(roomiest(space, Budget())) <= 0
