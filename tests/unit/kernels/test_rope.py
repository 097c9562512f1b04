"""rope: kernel, dispatch and twin agree, and with the torch code that training runs."""

import pytest
import torch

from rlhf_spmd.kernels.rope import rope, rope_in_place, rope_ref, rope_triton, rotate
from tests.unit.kernels.test_rmsnorm import DTYPES, ULP, random

SHAPES = pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim"), [(1, 1, 1, 16), (3, 6, 2, 80), (17, 7, 1, 32)]
)


@pytest.mark.parametrize("dtype", DTYPES)
@SHAPES
def test_rope(dtype, tokens, heads, kv_heads, head_dim, device):
    """Bit for bit what training computes; q and k are views of one projection."""
    (q, k, _), cos, sin = case(tokens, heads, kv_heads, head_dim, dtype, device)
    expected = rotate(q, cos, sin), rotate(k, cos, sin)
    assert not torch.equal(expected[0], q)
    apart = q.contiguous(), k.contiguous()
    for turn, both in ((rope_ref, (q, k)), (rope, (q, k)), (rope, apart)):
        assert all(torch.equal(got, x) for got, x in zip(turn(*both, cos, sin), expected, strict=True)), turn
    same(rope_triton(q, k, cos, sin), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@SHAPES
def test_rope_in_place(dtype, tokens, heads, kv_heads, head_dim, device):
    """The result lies where q and k were, and the gradients of q, k and v side by side."""
    parts, cos, sin = case(tokens, heads, kv_heads, head_dim, dtype, device)
    wanted = [x.clone().requires_grad_() for x in parts]
    expected = (*(rotate(x, cos, sin) for x in wanted[:2]), wanted[2])
    weights = [random(*x.shape, dtype=dtype, device=device, seed=2) for x in parts]
    expected_grads = torch.autograd.grad(expected, wanted, weights)
    inputs = [x.detach().requires_grad_() for x in parts]
    found = rope_in_place(*(x * 1 for x in inputs), cos, sin)
    same(found, expected)
    grads = torch.autograd.grad(found, inputs, weights)
    same(grads, expected_grads)
    with torch.no_grad():
        found = rope_in_place(*parts, cos, sin)
    assert all(x.data_ptr() == part.data_ptr() for x, part in zip(found, parts, strict=True))
    same(parts, expected)
    leaf = parts[0].clone().requires_grad_()  # an expanded gradient
    (grad,) = torch.autograd.grad(rope_in_place(leaf * 1, *parts[1:], cos, sin)[0].sum(), leaf)
    same([grad], torch.autograd.grad(rotate(leaf, cos, sin).sum(), leaf))


def case(tokens, heads, kv_heads, head_dim, dtype, device):
    """Returns q, k and v, views of one projection, and cos and sin."""
    fused = random(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype, device=device)
    angles = 100 * random(tokens, head_dim // 2, dtype=torch.float32, device=device, seed=1)
    return fused.split([heads, kv_heads, kv_heads], dim=1), angles.cos().to(dtype), angles.sin().to(dtype)


def same(found, expected):
    """Checks that the interpreter has the bits of torch's operations, or nearly: it cuts bfloat16 (see `near`)."""
    for got, x in zip(found, expected, strict=True):
        if got.dtype == torch.bfloat16 and not got.is_cuda:
            assert (got - x).abs().max() <= 4 * ULP[got.dtype] * max(x.abs().max(), 1.0)
        else:
            assert torch.equal(got, x)
