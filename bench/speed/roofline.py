"""The ceilings of a device as measured in the same run (bytes/s of memory, floating-point operations/s of matrix
products), and how calls are timed against one another: alternating, medians, on a GPU with a cold cache."""

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

from rlhf_spmd.kernels.products import LIBRARIES

FLUSH_BYTES = 2**30  # written before each timed call on a GPU: empties the cache and covers the time of launching
CPU_BYTES, GPU_BYTES = 2**28, 2**31


def alternate(calls: Mapping[str, Callable], device: torch.device, *, rounds: int) -> dict[str, float]:
    """Measures the median seconds of each call. They alternate, so that a slow moment of the machine affects all
    alike."""
    time_one = _gpu_timer(device) if device.type == "cuda" else elapsed_s
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seconds[name].append(time_one(call))
    return {name: statistics.median(found) for name, found in seconds.items()}


def elapsed_s(call: Callable) -> float:
    """Measures the seconds of a call, which ends when its work has."""
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def _gpu_timer(device: torch.device) -> Callable[[Callable], float]:
    waste = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def time_one(call: Callable) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        waste.zero_()  # the device is busy with this while the call is launched
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        return begin.elapsed_time(end) / 1e3

    return time_one


def memory_ceiling(device: torch.device) -> float:
    """Measures bytes/s: the better of reading (a sum) and copying (which reads and writes), beyond any cache."""
    num_bytes = GPU_BYTES if device.type == "cuda" else CPU_BYTES
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    seconds = alternate({"read": source.sum, "copy": lambda: target.copy_(source)}, device, rounds=9)
    return max(num_bytes / seconds["read"], 2 * num_bytes / seconds["copy"])


def matrix_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """Measures operations/s of a large square product; on a CPU by its fastest library."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    calls = {"product": lambda: a @ b}
    if device.type == "cpu":
        libraries = [one for one in LIBRARIES.values() if one.exists(dtype)]
        calls |= {one.name: partial(one.multiply, a, b, None) for one in libraries}
    with torch.inference_mode():
        return 2 * size**3 / min(alternate(calls, device, rounds=5).values())


def precision_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def ceilings_of(device: torch.device, *dtypes: torch.dtype) -> dict:
    """Returns the ceilings of memory and of matrix products in these precisions, which it also prints."""
    matrix = {precision_of(dtype): matrix_ceiling(device, dtype) for dtype in dtypes}
    ceilings = {"memory_bytes_per_s": memory_ceiling(device), "matrix_flops_per_s": matrix}
    rates = ", ".join(f"{name} {flops / 1e12:.2f} TFLOP/s" for name, flops in matrix.items())
    print(f"{name_of(device)}: memory {ceilings['memory_bytes_per_s'] / 1e9:.1f} GB/s, products {rates}", flush=True)
    return ceilings


def name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"
