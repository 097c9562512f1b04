"""Other systems beside the strategies: seconds and bytes against closed forms, speed-ups apart."""

from dataclasses import replace

import pytest

from bench.forecast.baselines import baseline_forecast, recomputing, setups
from bench.forecast.scan import phase_s
from bench.forecast.validate_systems import EAGER_LAYER_S, USABLE
from bench.rows import DEEPSPEED_CHAT, PER_TOKEN
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.calibration import Link
from rlhf_spmd.plan.cost.seconds import Cost

WORKLOAD = recomputing(make_workload(load("llama-7b", ["rollout_batch=64", "mini_batch=32"])))
CLUSTER = Cluster.parse("1x8", "a100-80g")
A100 = load_calibration("a100-80g")
WHOLE_BYTES = 2 * WORKLOAD.models["actor"].num_params


def one(name: str, cluster: Cluster = CLUSTER, tp: int = 1):
    """Returns the ZeRO 3 configuration of a baseline with so much tensor parallelism in generation."""
    found = [setup for setup in setups(name, WORKLOAD, cluster) if setup.plan.name == f"ZeRO 3, generation tp {tp}"]
    return found[0]


def decoding_s(setup, calibration) -> float:
    """Returns seconds of generating all rows of a device with weights that are whole."""
    devices = {name: replace(one, decode_layer_s=EAGER_LAYER_S) for name, one in calibration.devices.items()}
    cost = Cost(replace(calibration, devices=devices), setup.workload, CLUSTER)
    call = WORKLOAD.workflow.generate_calls[0]
    return cost.generate_s(call, setup.plan.placement.layouts[call.name], 0, [(256, 256)] * 8, setup.generated)[-1]


@pytest.mark.parametrize("rate", [234e9, 10e9])
def test_all_weights_travel_for_each_token(rate):
    """Closed form: tokens x bytes of all weights that others have / link + decode steps (and once for the prompts)."""
    calibration = replace(A100, inside=Link(rate, 0.0))
    setup = one(PER_TOKEN)
    assert setup.generated == 8  # all rows of a device
    seconds = phase_s(baseline_forecast(setup, CLUSTER, calibration))["generation"]
    gather_s = 7 / 8 * WHOLE_BYTES / rate
    assert seconds == pytest.approx((256 + 1) * gather_s + decoding_s(setup, calibration))


@pytest.mark.parametrize(("generated", "batches"), [(8, 1), (4, 2), (2, 4)])
def test_the_hybrid_engine_gathers_once_for_each_batch(generated, batches):
    workload = replace(WORKLOAD, max_sequences=generated)
    setup = replace(one(DEEPSPEED_CHAT), workload=workload, generated=generated)
    seconds = phase_s(baseline_forecast(setup, CLUSTER, A100))["generation"]
    gather_s = 7 / 8 * WHOLE_BYTES / A100.inside.bytes_per_s + 7 * A100.inside.latency_s
    assert seconds == pytest.approx(batches * gather_s + decoding_s(setup, A100))


def test_passes_of_training_gather_and_scatter_anew():
    """Two passes of 2 rows instead of one of 4: forward, recomputation and backward gather again, gradients travel
    again."""
    whole, halves = ({"actor_train": rows, "critic_train": rows} for rows in (4, 2))
    seconds = []
    for rows in (whole, halves):
        setup = one(DEEPSPEED_CHAT)
        layouts = dict(setup.plan.placement.layouts)
        for name, number in rows.items():
            layouts[name] = replace(layouts[name], micro_batch=number)
        plan = replace(setup.plan, placement=replace(setup.plan.placement, layouts=layouts))
        free = {name: replace(device, layer_s=0.0) for name, device in A100.devices.items()}
        setup = replace(setup, plan=plan, trained=rows["actor_train"])
        seconds.append(baseline_forecast(setup, CLUSTER, replace(A100, devices=free)).makespan_s)
    gather_s = 7 / 8 * WHOLE_BYTES / A100.inside.bytes_per_s + 7 * A100.inside.latency_s
    critic_s = gather_s - 7 / 8 * 2 * 4096 * (32000 - 1) / A100.inside.bytes_per_s  # a head of one column
    assert seconds[1] - seconds[0] == pytest.approx(2 * (3 + 1) * (gather_s + critic_s))


def test_the_hybrid_engine_needs_room_for_whole_weights():
    """65B on 64 devices: 130 GB gathered do not fit on one, an eighth does; without the engine nothing is gathered."""
    workload = recomputing(make_workload(load("llama-65b")))
    cluster = Cluster.parse("8x8", "a100-80g")
    names = [setup.plan.name for setup in setups(DEEPSPEED_CHAT, workload, cluster)]
    assert "ZeRO 3, generation tp 8" in names and "ZeRO 3, generation tp 1" not in names
    (setup,) = setups(PER_TOKEN, workload, cluster)
    assert setup.plan.name == "ZeRO 3, generation tp 1"
    assert all(found.peak_bytes <= USABLE * 80 * 2**30 for found in setups(DEEPSPEED_CHAT, workload, cluster))
