"""The bottleneck of a call, with constants that leave no doubt and against costs of whole forecasts."""

from dataclasses import replace
from math import inf

import pytest

from rlhf_spmd.plan.cost.bottleneck import limits
from rlhf_spmd.plan.cost.calibration import Link
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.cost.forecast_summary import call_s
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.compile import compile_program
from tests.unit.plan.cost.test_seconds import cost_of, machine

CALLS = ("actor_generate", "reference_infer", "reward_infer", "critic_infer", "actor_train", "critic_train")


def test_host_memory_limits_what_comes_from_there():
    calibration = machine(host_bytes_per_s=1.0)
    program = cost_of(calibration).program
    assert limits(program, calibration)["reference_infer"] == "products"
    layouts = dict(program.placement.layouts)
    layouts["reference_infer"] = replace(layouts["reference_infer"], offload=True)
    told = limits(compile_program(program.workload, Placement(layouts), program.cluster), calibration)
    assert (told["reference_infer"], told["reward_infer"]) == ("host memory", "products")


@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"train": {"zero": 1}}], ids=str)
def test_the_named_resource_is_the_one_whose_absence_saves_most(options):
    """A slow twin: whole forecasts with one constant changed at a time; all ranks are alike, so calls are their own."""
    calibration = machine(
        matrix_flops=2e8, memory_bytes_per_s=2e8, layer_s=2e-4, decode_layer_s=1e-3, inside=Link(1e8, 1e-4)
    )
    case = cost_of(calibration, 2, **options)
    device = calibration.devices["cpu"]
    changed = {
        "products": replace(calibration, devices={"cpu": replace(device, matrix_flops=inf)}),
        "memory": replace(calibration, devices={"cpu": replace(device, memory_bytes_per_s=inf)}),
        "kernel starts": replace(calibration, devices={"cpu": replace(device, layer_s=0.0, decode_layer_s=0.0)}),
        "messages": replace(calibration, inside=Link(inf, 0.0)),
    }
    without = {name: call_s(forecast(case.program, one)) for name, one in changed.items()}
    told = limits(case.program, calibration)
    for call in CALLS:
        assert told[call] == min(changed, key=lambda name, call=call: without[name][call]), call
