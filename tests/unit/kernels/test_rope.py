"""rope: kernel, dispatch and twin agree, and with the torch code that training runs."""

import pytest
import torch

from rlhf_spmd.kernels.rope import rope, rope_ref, rope_triton, rotate
from tests.unit.kernels.test_rmsnorm import DTYPES, ULP, random


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "head_dim"), [(1, 1, 1, 16), (3, 6, 2, 80), (17, 7, 1, 32)])
def test_rope(dtype, tokens, heads, kv_heads, head_dim, device):
    """Bit for bit what training computes; q and k are views of one projection."""
    fused = random(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype, device=device)
    q, k = fused[:, :heads], fused[:, heads : heads + kv_heads]
    angles = 100 * random(tokens, head_dim // 2, dtype=torch.float32, device=device, seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = rotate(q, cos, sin), rotate(k, cos, sin)
    assert not torch.equal(expected[0], q)
    apart = q.contiguous(), k.contiguous()
    for turn, both in ((rope_ref, (q, k)), (rope, (q, k)), (rope, apart)):
        assert all(torch.equal(got, x) for got, x in zip(turn(*both, cos, sin), expected, strict=True)), turn
    largest = fused.abs().max()
    for got, x in zip(rope_triton(q, k, cos, sin), expected, strict=True):
        if dtype == torch.bfloat16 and device == "cpu":  # cut, not rounded: see `near`
            assert (got - x).abs().max() <= 4 * ULP[dtype] * largest
        else:
            assert torch.equal(got, x)
