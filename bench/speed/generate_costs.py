"""The least time of a decode step on this device."""

import torch

from bench.speed.roofline import alternate, precision_of
from rlhf_spmd.kernels.products import LINEAR, in_use
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.generation.kv_cache import token_bytes


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
