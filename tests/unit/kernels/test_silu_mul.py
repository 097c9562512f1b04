"""silu_mul: kernel, dispatch and twin agree, and with the torch code that training runs."""

import pytest
import torch
import torch.nn.functional as F

from rlhf_spmd.kernels import triton_import
from rlhf_spmd.kernels.silu_mul import TILE, silu_mul, silu_mul_ref, silu_mul_triton, swiglu, swiglu_backward_triton
from tests.unit.kernels.test_rmsnorm import DTYPES, ULP, near, random


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 257), (2, TILE + 5), (17, 64)])
def test_silu_mul(dtype, num_rows, size, device):
    fused = 4 * random(num_rows, 2 * size, dtype=dtype, device=device)
    gate, up = fused.chunk(2, dim=-1)
    expected = F.silu(gate) * up
    near(silu_mul_ref(gate, up), expected, ulps=8 if dtype == torch.float32 else 1)
    for got in (silu_mul(fused), silu_mul(gate, up), silu_mul_triton(gate, up)):
        near(got, expected, ulps=8 if dtype == torch.float32 else 1)


def test_silu_mul_at_the_ends(device):
    gate = torch.tensor([[-torch.inf, -200.0, -0.0, 0.0, 200.0, torch.inf]], device=device)
    got = silu_mul_triton(gate, torch.ones_like(gate))
    torch.testing.assert_close(got[:, 1:], F.silu(gate)[:, 1:])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_swiglu_has_the_bits_of_autograd(dtype):
    gate, up, grad = (random(3, 257, dtype=torch.float32, device="cpu").to(dtype) for _ in range(3))
    found, wanted = ([one.clone().requires_grad_() for one in (gate, up)] for _ in range(2))
    y, twin = swiglu(*found), F.silu(wanted[0]) * wanted[1]
    y.backward(grad)
    twin.backward(grad)
    assert torch.equal(y, twin)
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 257), (2, TILE + 5), (17, 64)])
def test_swiglu_backward(dtype, num_rows, size, device):
    """The kernel against torch's derivative; both gradients are halves of one tensor."""
    gate, up = (4 * random(num_rows, 2 * size, dtype=dtype, device=device)).chunk(2, dim=-1)
    grad = random(num_rows, size, dtype=dtype, device=device, seed=1)
    leaves = [x.clone().requires_grad_() for x in (gate, up)]
    wanted = torch.autograd.grad(F.silu(leaves[0]) * leaves[1], leaves, grad)
    found = swiglu_backward_triton(grad, gate, up)
    for got, x in zip(found, wanted, strict=True):
        close(got, x)
    assert found[1].data_ptr() - found[0].data_ptr() == size * dtype.itemsize


def test_swiglu_by_kernels(device, monkeypatch):
    monkeypatch.setattr(triton_import, "DEVICES", ("cpu", "cuda"))
    leaves = [random(3, 257, dtype=torch.float32, device=device, seed=at).requires_grad_() for at in range(2)]
    y, wanted = swiglu(*leaves), F.silu(leaves[0]) * leaves[1]
    near(y.detach(), wanted.detach(), ulps=8)
    for got, x in zip(*(torch.autograd.grad(one.sum(), leaves) for one in (y, wanted)), strict=True):
        close(got, x)


def close(got, x):
    """Checks gradients within a few units of the last bit of the largest: 1 + x (1 - p) cancels near its zero."""
    assert got.dtype == x.dtype
    assert (got - x).abs().max() <= 8 * ULP[got.dtype] * x.abs().max().clamp_min(1.0)
