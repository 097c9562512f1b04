"""Sequences that decode at once where a device has room for fewer than generation.max_sequences."""

from dataclasses import replace

import pytest

from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.cost.memory import most_bytes, places_of
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.proof.memory_check import memory
from rlhf_spmd.strategies import flattening, reallocation

QWEN = (
    "data.max_prompt=512",
    "generation.max_new_tokens=8192",
    "samples_per_prompt=8",
    "rollout_batch=16",
    "mini_batch=16",
    "micro_batch=4",
    "reward_function=rlhf_spmd.rewards:numeric_answer",
)
REALLOCATED = {"training_tp": 4, "generation_tp": 4, "zero": 1, "recompute": True}


@pytest.mark.parametrize(
    ("preset", "algorithm", "words", "device_type", "place", "options"),
    [
        ("qwen2.5-7b", "grpo", QWEN, "a100-40g", reallocation.place, REALLOCATED),
        ("llama-7b", "ppo", (), "a100-80g", flattening.place, {"tp": 4, "zero": 3, "recompute": True}),
    ],
)
def test_what_fits_takes_as_long_as_that_limit(preset, algorithm, words, device_type, place, options):
    """No shown peak is above what a program may use; the warning says how many sequences decode at a time."""
    calibration, cluster = load_calibration(f"{device_type}-derived"), Cluster.parse("1x4", device_type)
    workload = make_workload(load(preset, words, algorithm=algorithm))
    program = compile_program(workload, place(workload, cluster, **options), cluster)
    (call,) = workload.workflow.generate_calls
    (number,) = set(places_of(program, call).values())
    assert 1 < number < workload.max_sequences
    (finding,) = memory(program)
    assert f"generation decodes {number} of " in finding.message and finding.severity == "warning"
    assert most_bytes(program) <= cluster.usable_bytes(0)
    fewer, more = (
        compile_program(replace(workload, max_sequences=places), program.placement, cluster)
        for places in (number, number + 1)
    )
    assert not memory(fewer) and memory(more), "the most that has room"
    assert forecast(program, calibration).makespan_s == forecast(fewer, calibration).makespan_s
    roomy = Cluster(tuple(replace(node, device_bytes=None) for node in cluster.nodes))
    whole = compile_program(workload, program.placement, roomy)
    assert forecast(whole, calibration).makespan_s < 0.97 * forecast(program, calibration).makespan_s
