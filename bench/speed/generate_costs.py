"""The least time of a decode step on this device, and where the rest of its time goes."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from bench.speed.roofline import alternate
from rlhf_spmd.kernels import cpu
from rlhf_spmd.kernels.products import LINEAR, in_use
from rlhf_spmd.model import kv_attention
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.generation import engine
from rlhf_spmd.runtime.generation.kv_cache import token_bytes

# what counts as a part of its own, whatever operations it is made of
PARTS = {
    "attention": [(kv_attention, "decode_attention"), (kv_attention, "kv_write")],
    "sampling": [(engine, "sample")],
}
PRODUCTS = (
    "aten::mm",
    "aten::addmm",
    "aten::linear",
    "aten::matmul",
    "aten::bmm",
    "aten::t",
    "mkldnn",
    "onednn",
    "mkl::",
)
OTHERS = "small operations"
NATIVE = {  # kernels of our own, which are no operations of torch
    "product": "matrix products",
    "decode_attention": "attention",
    "kv_write": "attention",
    "block_masses": "sampling",
    "rmsnorm": OTHERS,
    "rotate": OTHERS,
    "silu_mul": OTHERS,
}
PYTHON = "Python and bookkeeping"


def products_of(model: Transformer) -> list[torch.Tensor]:
    """The weights that a decode step multiplies with."""
    tied = model.config.tie_embeddings
    named = model.named_parameters()
    return [weight for name, weight in named if weight.dim() == 2 and (tied or "embed_tokens" not in name)]


def floor(model: Transformer, rows: int, context: float, ceilings: dict) -> dict[str, float]:
    """Seconds of a decode step: by the bytes it must read (weights once, keys and values of every row), by the
    operations of its products, and what these take when nothing else is done; `floor_s`: the larger of the first two.
    """
    weights, dtype = products_of(model), str(model.dtype).removeprefix("torch.")
    num_bytes = sum(weight.nbytes for weight in weights) + rows * context * token_bytes(model)
    flops = 2 * rows * sum(weight.numel() for weight in weights)
    memory_s, matrix_s = num_bytes / ceilings["memory_bytes_per_s"], flops / ceilings["matrix_flops_per_s"][dtype]
    device = weights[0].device
    inputs = {
        size: torch.randn(rows, size, device=device).to(model.dtype) for size in {weight.shape[1] for weight in weights}
    }

    library = LINEAR if weights[0].is_cuda else in_use(model.dtype)
    packed = [library.pack(weight, rows) for weight in weights]

    @torch.inference_mode()
    def multiply() -> None:
        for weight, own in zip(weights, packed, strict=True):
            library.multiply(inputs[weight.shape[1]], own, None)

    products_s = alternate({"products": multiply}, device, rounds=7)["products"]
    found = {"bytes": num_bytes, "memory_s": memory_s, "matrix_s": matrix_s, "products_s": products_s}
    return found | {"floor_s": max(memory_s, matrix_s)}


def breakdown(call: Callable[[], object], wall_s: float) -> dict[str, float]:
    """Shares of a run by what its operations are for. wall_s: of the same run without the profiler, which slows Python
    and not the operations; what they leave of it is Python."""
    with named_parts(), profile(activities=[ProfilerActivity.CPU]) as found:
        call()
    seconds: dict[str, float] = defaultdict(float)
    for event in found.events():
        if event.device_type == DeviceType.CPU and event.name.startswith(
            ("aten::", "mkldnn", "onednn", "mkl::", "native::")
        ):
            seconds[_part_of(event)] += event.self_cpu_time_total / 1e6
    total_s = max(wall_s, sum(seconds.values()))  # on a busy machine a run may take longer than the one before it
    seconds[PYTHON] = total_s - sum(seconds.values())
    return {name: taken_s / total_s for name, taken_s in sorted(seconds.items(), key=lambda item: -item[1])}


def _part_of(event) -> str:
    if event.name.startswith("native::"):
        return NATIVE[event.name.removeprefix("native::")]
    above = event
    while above is not None:
        if above.name in PARTS:
            return above.name
        above = above.cpu_parent
    return "matrix products" if event.name.startswith(PRODUCTS) else OTHERS


@contextmanager
def named_parts() -> Iterator[None]:
    """Lets the profiler see the parts by their names."""
    with ExitStack() as stack:
        for name, places in PARTS.items():
            for module, function in places:
                stack.enter_context(patch.object(module, function, _recorded(name, getattr(module, function))))
        for function in NATIVE:
            stack.enter_context(patch.object(cpu, function, _recorded(f"native::{function}", getattr(cpu, function))))
        yield


def _recorded(name: str, function: Callable) -> Callable:
    def wrapped(*args, **kwargs):
        with record_function(name):
            return function(*args, **kwargs)

    return wrapped
