"""Packed sequences against one row at a time, recomputation, and what torch's packed kernel is called with."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_spmd.model import attention
from rlhf_spmd.model.attention import Packed
from rlhf_spmd.model.config import from_hf
from rlhf_spmd.model.parallel import Parallel
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.shard import Shard

SMALL = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 13,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
CASES = {
    "llama": ("llama", {}),
    "mha, biases": ("llama", {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True}),
    "one key": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "window": ("mistral", {"sliding_window": 5}),
    "window 1": ("mistral", {"sliding_window": 1}),
    "some windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qk norm": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4}}),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "yarn": ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
    "llama3": ("llama", {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}}),
}
LENGTHS = [(7,), (1,), (1, 1, 1), (5, 5, 5), (9, 1, 23, 2), (3, 3, 17, 17, 1, 1, 12), (1, 40)]


def make_model(case: str, *, head: str = "lm", dtype=torch.float64, **options) -> Transformer:
    """Makes a model with every parameter away from its initial value."""
    family, values = CASES[case]
    model = Transformer(from_hf({"model_type": family, **SMALL, **values}), head=head, dtype=dtype, **options)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.data = (float(weight.dim() == 1) + 0.3 * torch.randn(weight.shape, generator=generator)).to(dtype)
    return model


def some_tokens(lengths, seed: int = 0) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.integers(0, SMALL["vocab_size"], length)) for length in lengths]


def gradients(model: Transformer) -> dict[str, Tensor]:
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize(
    ("case", "lengths"),
    [(case, LENGTHS[(number + more) % len(LENGTHS)]) for number, case in enumerate(CASES) for more in (0, 4)],
    ids=str,
)
def test_packed_rows_equal_single_rows(case, lengths):
    """Outputs and gradients; with any padding at the end."""
    model, rows = make_model(case), some_tokens(lengths)
    weight_ND = torch.randn(sum(lengths), 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    alone_ND = torch.cat([model(row[None])[0] for row in rows])
    (alone_ND * weight_ND).sum().backward()
    expected = gradients(model)
    for more in (0, 1, 4):
        context = Packed(lengths, num_tokens=sum(lengths) + more)
        assert context.num_tokens == sum(lengths) + more
        packed_ND = model(torch.cat(rows), context=context)
        assert packed_ND.shape == (context.num_tokens, 24)
        torch.testing.assert_close(packed_ND[: sum(lengths)], alone_ND, atol=1e-12, rtol=1e-12)
        (packed_ND[: sum(lengths)] * weight_ND).sum().backward()
        found_all = gradients(model)
        assert set(found_all) == set(expected)
        for name, found in found_all.items():
            torch.testing.assert_close(found, expected[name], atol=1e-11, rtol=1e-11, msg=name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["mha, biases", "some windows", "qk norm"])
def test_recomputation_gives_the_same_bits(case, dtype):
    model, rows = make_model(case, dtype=dtype), some_tokens((9, 1, 4))
    found = []
    for recompute in (False, True):
        model.recompute = recompute
        logits_NV = model.logits(model(torch.cat(rows), context=Packed((9, 1, 4))))
        (logits_NV.float().log_softmax(1)[:, 5]).sum().backward()
        found.append((logits_NV.detach(), gradients(model)))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


# ---- shards ----------------------------------------------------------------------------------------------------------


def place(shard: Shard) -> Parallel:
    """Returns a shard without its messages."""
    return Parallel(shard, group=SimpleNamespace(size=lambda: shard.tp) if shard.tp > 1 else None)


LENGTHS = (5, 1, 9)


def one_by_one(q, k, v, cuts_q, cuts_k, longest_q, longest_k, *, window_size, enable_gqa=False):
    """Computes attention sequence by sequence, as the kernel is documented: heads of keys are repeated only if it is
    told so."""
    assert torch.equal(cuts_q, cuts_k) and longest_q == longest_k == max(LENGTHS) and window_size[1] == 0
    assert enable_gqa or q.shape[1] == k.shape[1]
    out = []
    for start, end in zip(cuts_q[:-1].tolist(), cuts_q[1:].tolist(), strict=True):
        parts = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        window = None if window_size[0] < 0 else window_size[0] + 1
        out.append(attention.attend(*parts, window)[0].transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("num_kv_heads", [6, 2])
@pytest.mark.parametrize("options", [{"window_size", "enable_gqa"}, {"window_size"}], ids=["torch 2.13", "torch 2.11"])
def test_every_version_of_the_kernel_gets_what_it_takes(options, num_kv_heads, window, monkeypatch):
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(LENGTHS), heads, 8) for heads in (6, num_kv_heads, num_kv_heads))
    packed = Packed(LENGTHS)
    expected = packed.attend(0, q, k, v, window)

    def kernel(*tensors, **given):
        assert given.keys() <= options
        return one_by_one(*tensors, **given)

    monkeypatch.setattr(attention, "has_packed_kernel", lambda q: True)
    monkeypatch.setattr(attention, "_varlen_attn", lambda: (kernel, frozenset(options)))
    torch.testing.assert_close(packed.attend(0, q, k, v, window), expected)
