"""The calibrations that are derived from data sheets and counted kernels (bench/forecast/derived.py), written into
rlhf_spmd/machines/calibrations/.

Cost: none. Command: python -m tools derive
"""

import json

from bench.forecast.derived import (
    DECODE_KERNELS,
    FORWARD_KERNELS,
    GPU,
    GPUS,
    KERNEL_S,
    LLAMA_7B,
    MEMORY_SHARE,
    NUMBER_BYTES,
    attention_s,
    memory_s,
    moved_when_training,
    product_s,
)
from rlhf_spmd.machines.calibration_file import SHIPPED, write_calibration
from rlhf_spmd.plan.cost.calibration import OF_DEVICE, OF_LINKS, Calibration, Device, Link
from rlhf_spmd.plan.cost.seconds import layer_flops
from rlhf_spmd.plan.workload import ModelShape

# Assumed
HOST_SHARE = 0.80  # of host_bytes
LINK_SHARE = 0.78  # of link_bytes, as fitted to published runs on A100s
HOP_S = 1.5e-6  # of a message over NVLink inside a collective
LAUNCH_S = 12e-6  # in which the host launches one kernel: torch 6 us, Triton 12, attention's Python operation 60
NETWORK_S = 10e-6  # of a message between nodes


def link(gpu: GPU) -> Link:
    """Returns NVLink inside a node."""
    return Link(LINK_SHARE * gpu.link_bytes, HOP_S)


def layer_rate(gpu: GPU, shape: ModelShape, length: int = 1024) -> float:
    """Returns the FLOP/s of a layer of training: products, attention and the kernels between them. The formulas of
    seconds.py have one rate for all three."""
    flops = layer_flops(shape, 1, length / 2)
    attention = flops - layer_flops(shape, 1, 0)
    moved = NUMBER_BYTES * sum(moved_when_training(shape))
    seconds = product_s(gpu, 3 * (flops - attention)) + attention_s(gpu, 3.5 * attention) + memory_s(gpu, moved)
    return 3 * flops / seconds


def calibration(device: str) -> Calibration:
    """Returns the constants of a type of GPU with this engine, whose decode steps are CUDA graphs."""
    gpu = GPUS[device]
    constants = Device(
        matrix_flops=layer_rate(gpu, LLAMA_7B),
        memory_bytes_per_s=MEMORY_SHARE * gpu.memory_bytes,
        host_bytes_per_s=HOST_SHARE * gpu.host_bytes,
        layer_s=FORWARD_KERNELS * KERNEL_S,
        decode_layer_s=DECODE_KERNELS * LAUNCH_S,
        decode_reduce_s=LAUNCH_S,
        graph_layer_s=DECODE_KERNELS * KERNEL_S,
    )
    about = (
        "Derived for this program from data sheets and counted kernels (bench/forecast/derived.py). matrix_flops: a "
        f"layer of 7B training, its products at {gpu.matrix_share:.0%} of {gpu.matrix_flops / 1e12:.0f}e12 and its "
        f"other kernels at the rate of memory, {MEMORY_SHARE:.0%} of {gpu.memory_bytes / 1e9:,.0f}e9; graph_layer_s: "
        f"{DECODE_KERNELS} kernels of a decode step from a CUDA graph, {1e6 * KERNEL_S:g} us each. No GPU has "
        "confirmed any of it."
    )
    between = Link(gpu.network_bytes, NETWORK_S)
    sources = dict.fromkeys((*OF_DEVICE, *OF_LINKS), "derived") | {"between.bytes_per_s": "data sheet"}
    latencies = ("inside.latency_s", "between.latency_s", "host.latency_s")
    sources |= dict.fromkeys((*latencies, "host.bytes_per_s"), "assumed")
    name = f"{device}-derived"
    return Calibration(name, {device: constants}, link(gpu), between, about, pipelined_prefill=True, sources=sources)


def main(arguments: list[str]) -> int:
    assert not arguments, "derive takes no options"
    found = [calibration(device) for device in GPUS]
    for one in found:
        write_calibration(one, str(SHIPPED / f"{one.name}.json"))
    print(json.dumps({"tool": "derive", "calibrations": [one.name for one in found], "ok": True}))
    return 0
