"""The optimizer's step against torch's own class, bit by bit; the runtime is imported without torch's compiler."""

import re
import subprocess
import sys

import pytest
import torch

from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.engines.adamw import MOMENTS, AdamW, decays

SETTINGS = dict(betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)


def masters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    numbers = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=numbers, dtype=dtype)) for shape in ((7, 3), (5,), (1,))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_torch(dtype):
    ours, theirs = masters(dtype), masters(dtype)
    optimizer, expected = AdamW(ours, **SETTINGS), torch.optim.AdamW(theirs, fused=True, **SETTINGS)
    numbers = torch.Generator().manual_seed(1)
    for step in range(4):
        gradients = [torch.randn(a.shape, generator=numbers, dtype=dtype) for a in ours]
        for b, gradient in zip(theirs, gradients, strict=True):
            b.grad = gradient.clone()
        expected.param_groups[0]["lr"] = 0.1 / (step + 1)
        expected.step()
        optimizer.step(gradients, lr=0.1 / (step + 1))
        assert optimizer.num_steps == step + 1
        for a, b, state in zip(ours, theirs, optimizer.states, strict=True):
            assert torch.equal(a, b)
            assert all(torch.equal(state[kind], expected.state[b][kind]) for kind in MOMENTS)


def test_parts_without_weight_decay():
    """As if each part were a weight of its own, in another group of torch's."""
    (whole, alone), apart = masters(torch.float64)[:2], []
    parts = [(0, slice(0, 4)), (0, slice(9, 21))]  # of 21 numbers
    optimizer = AdamW([whole, alone], **SETTINGS, bare=parts)
    for start, stop in ((0, 4), (9, 21), (4, 9)):
        apart.append(torch.nn.Parameter(whole.detach().flatten()[start:stop].clone()))
    rest = torch.nn.Parameter(alone.detach().clone())
    groups = [{"params": apart[:2], "weight_decay": 0.0}, {"params": [apart[2], rest]}]
    expected = torch.optim.AdamW(groups, fused=True, **SETTINGS)
    for step in range(3):
        for p in (*apart, rest):
            p.grad = torch.full_like(p, 2.0 if p is rest else 0.5 - step)
        expected.param_groups[0]["lr"] = expected.param_groups[1]["lr"] = 0.1
        expected.step()
        optimizer.step([torch.full_like(whole, 0.5 - step), torch.full_like(alone, 2.0)], lr=0.1)
    torch.testing.assert_close(whole.detach().flatten(), torch.cat([apart[0], apart[2], apart[1]]).detach())
    torch.testing.assert_close(alone, rest)
    assert optimizer.num_steps == 3


@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("tied", [False, True])
def test_what_decays(head, tied):
    """`matrices` is the choice of transformers' trainer, and so of TRL: by its patterns of names."""
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 4,
    }
    more = {
        "attention_bias": True,
        "attention_output_bias": True,
        "qk_norm": True,
        "norms": "both",
        "tie_embeddings": tied,
        "max_position_embeddings": 9,
    }
    config = ModelConfig("qwen3", vocab_size=9, bos_token_id=0, eos_token_ids=(1,), **sizes, **more)
    weights = dict(Transformer(config, head=head, dtype=torch.float32).named_parameters())
    found = {on: [name for name, p in weights.items() if decays(name, p, on)] for on in ("all", "matrices", "linear")}
    patterns = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]  # of transformers 5.23
    assert found["all"] == list(weights)
    assert found["matrices"] == [name for name in weights if not any(re.search(one, name) for one in patterns)]
    assert set(found["matrices"]) - set(found["linear"]) == {"embed_tokens.weight"}
    assert len(found["linear"]) == 7 + (head == "scalar" or not tied)  # of a layer; the head


def test_goes_on_after_so_many_steps():
    whole, second = AdamW(masters(torch.float32), **SETTINGS), AdamW(masters(torch.float32), **SETTINGS)
    ones = [torch.ones_like(state["master"]) for state in whole.states]
    whole.step(ones, lr=0.1)
    second.begin(whole.num_steps)
    with torch.no_grad():
        for state, other in zip(second.states, whole.states, strict=True):
            for kind, value in state.items():
                value.copy_(other[kind])
    whole.step(ones, lr=0.1)
    second.step(ones, lr=0.1)
    for state, other in zip(second.states, whole.states, strict=True):
        assert all(torch.equal(value, other[kind]) for kind, value in state.items())


def test_a_rank_starts_without_torchs_compiler():
    code = """if True:
        import sys, torch
        from rlhf_spmd.runtime.run import train
        from rlhf_spmd.runtime.engines.adamw import AdamW
        p = torch.ones(2)
        AdamW([p], betas=(0.9, 0.9), eps=1e-5, weight_decay=0.0).step([torch.ones(2)], lr=0.1)
        print([name for name in ("torch._dynamo", "deepspeed", "matplotlib") if name in sys.modules])"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True).stdout
    assert found.strip() == "[]"
