"""The ceilings of a device as measured in the same run (bytes/s of memory, floating-point operations/s of matrix
products), and how calls are timed against one another: alternating, medians, on a GPU with a cold cache."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from rlhf_spmd.kernels.products import LIBRARIES, LINEAR, in_use
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.generation.kv_cache import token_bytes

FLUSH_BYTES = 2**30  # written before each timed call on a GPU: empties the cache and covers the time of launching
CPU_BYTES, GPU_BYTES = 2**28, 2**31


def in_turns(calls: Mapping[str, Callable[[], Any]], rounds: int) -> list[dict[str, Any]]:
    """Calls all in each round, in an order that changes, so that a slow moment of the machine affects all alike -> what
    they return, by round."""
    return [{name: calls[name]() for name in list(calls)[:: -1 if number % 2 else 1]} for number in range(rounds)]


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the median of each call over the rounds."""
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def alternate(calls: Mapping[str, Callable], device: torch.device, *, rounds: int) -> dict[str, float]:
    """Measures the median seconds of each call, in turns."""
    time_one = _gpu_timer(device) if device.type == "cuda" else elapsed_s
    for call in calls.values():
        call()
    return medians(in_turns({name: partial(time_one, call) for name, call in calls.items()}, rounds))


def elapsed_s(call: Callable, clock: Callable[[], float] = time.perf_counter) -> float:
    """Measures the seconds of a call, which ends when its work has."""
    start_s = clock()
    call()
    return clock() - start_s


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


# ---- the least time of a decode step ---------------------------------------------------------------------------------


def products_of(model: Transformer) -> list[torch.Tensor]:
    """Returns the weights that a decode step multiplies with."""
    tied = model.config.tie_embeddings
    named = model.named_parameters()
    return [weight for name, weight in named if weight.dim() == 2 and (tied or "embed_tokens" not in name)]


def floor(model: Transformer, rows: int, context: float, ceilings: dict) -> dict[str, float]:
    """Returns the least seconds of a decode step: by the bytes it must read (weights once, keys and values of every
    row), by the operations of its products, and what these take when nothing else is done; `floor_s`: the larger of the
    first two.
    """
    weights, dtype = products_of(model), precision_of(model.dtype)
    num_bytes = sum(weight.nbytes for weight in weights) + rows * context * token_bytes(model)
    flops = 2 * rows * sum(weight.numel() for weight in weights)
    memory_s, matrix_s = num_bytes / ceilings["memory_bytes_per_s"], flops / ceilings["matrix_flops_per_s"][dtype]
    device, library = weights[0].device, LINEAR if weights[0].is_cuda else in_use(model.dtype)
    pairs = [
        (torch.randn(rows, weight.shape[1], device=device).to(model.dtype), library.pack(weight, rows))
        for weight in weights
    ]

    @torch.inference_mode()
    def multiply() -> None:
        for x, packed in pairs:
            library.multiply(x, packed, None)

    products_s = alternate({"products": multiply}, device, rounds=7)["products"]
    found = {"bytes": num_bytes, "memory_s": memory_s, "matrix_s": matrix_s, "products_s": products_s}
    return found | {"floor_s": max(memory_s, matrix_s)}
