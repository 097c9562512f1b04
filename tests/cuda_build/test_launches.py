"""Launches of a layer, and the bytes that its forward pass keeps for training."""

from collections import Counter

import pytest
import torch

from rlhf_spmd.kernels.decode_attention import Decode
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.kv_attention import DecodeStep, Round
from rlhf_spmd.model.sequences import Sequences, forward
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.adapters import Adapters
from rlhf_spmd.plan.cost.memory import layer_numbers
from rlhf_spmd.plan.workload import ModelShape
from rlhf_spmd.runtime.generation.kv_cache import KVCache
from tests.cuda_build.fake_gpu import gpu, launches

SIZES = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_heads": 28, "num_kv_heads": 4}
FAMILIES = {"llama": {}, "qwen2": {"attention_bias": True}, "qwen3": {"qk_norm": True}}
TOKENS = 8192


def model_of(family: str, layers: int, **options) -> Transformer:
    config = ModelConfig(model_type=family, num_layers=layers, head_dim=128, **SIZES, **FAMILIES[family])
    return Transformer(config, head="lm", dtype=torch.bfloat16, device="meta", **options)


def load(model: Transformer) -> None:
    model.take({n: torch.empty(p.shape, dtype=p.dtype, device="cuda") for n, p in model.named_parameters()})


def decode_launches(family: str, layers: int, **options) -> Counter[str]:
    model, rows = model_of(family, layers, **options).requires_grad_(False), 64
    with gpu(), torch.inference_mode():
        load(model)
        cache, long = KVCache(model, 1024, 16), {"dtype": torch.int64, "device": "cuda"}
        cached, tokens, slots = (torch.zeros(rows, **long) for _ in range(3))
        tables = torch.zeros(rows, 64, dtype=torch.int32, device="cuda")
        with launches() as counts:
            decode = Decode.prepare(tables, cached + 1, 16, model.dtype)
            model.through_stages(tokens, Round(DecodeStep(cache, cached, slots, decode), None, None))
    return counts


def batch_of(tokens: int) -> Sequences:
    rows, prompt = 8, 128
    response = tokens // rows - prompt
    long = {"dtype": torch.int64, "device": "cuda"}
    responses = torch.zeros(rows, response, dtype=torch.int32, device="cuda")
    zeros = [torch.zeros(rows * response, **long) for _ in range(2)]
    lengths = torch.full((rows,), response, device="cuda")
    return Sequences(torch.zeros(tokens, **long), (tokens // rows,) * rows, lengths, responses, *zeros)


def forward_launches(family: str, layers: int, *, trains: bool) -> Counter[str]:
    model = model_of(family, layers)
    with gpu(), torch.set_grad_enabled(trains):
        load(model)
        model.requires_grad_(trains)
        batch = batch_of(TOKENS)
        with launches() as counts:
            forward(model, batch)
    return counts


@pytest.mark.parametrize(("family", "most"), [("llama", 11), ("qwen2", 11), ("qwen3", 13)])
def test_launches_of_a_decode_layer(family, most):
    of_layer = decode_launches(family, 3) - decode_launches(family, 2)
    assert of_layer.total() == most, of_layer


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(("family", "most"), [("llama", 9), ("qwen2", 9), ("qwen3", 11)])
def test_launches_of_a_forward_layer(family, most, trains):
    of_layer = forward_launches(family, 3, trains=trains) - forward_launches(family, 2, trains=trains)
    assert of_layer.total() == most, of_layer


@pytest.mark.parametrize("adapters", [None, Adapters(16, 32.0)], ids=["full", "adapters"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_keeps_what_is_counted(family, adapters):
    shape = ModelShape(
        2,
        *(SIZES[name] for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads")),
        128,
        SIZES["vocab_size"],
        qk_norm=family == "qwen3",
        adapters=adapters,
    )
    kept = [kept_bytes(family, layers, adapters) for layers in (2, 3)]
    assert kept[1] - kept[0] == pytest.approx(2 * TOKENS * layer_numbers(shape, 1, 0), rel=0.01)


def kept_bytes(family: str, layers: int, adapters: Adapters | None) -> int:
    """Returns the bytes of the tensors that the forward pass of training keeps, each memory once, without weights."""
    kept: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        alive.append(x)  # or another would lie at its place
        kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    model = model_of(family, layers, adapters=adapters)
    with gpu():
        load(model)
        for name, one in model.named_parameters():
            one.requires_grad_(name in model.trained_names())
        with launches(), torch.autograd.graph.saved_tensors_hooks(note, note):
            forward(model, batch_of(TOKENS))
        for one in model.parameters():
            kept.pop(one.untyped_storage()._cdata, None)
    return sum(kept.values())
