"""silu_mul: kernel, dispatch and twin agree, and with the torch code that training runs."""

import pytest
import torch
import torch.nn.functional as F

from rlhf_spmd.kernels.silu_mul import TILE, silu_mul, silu_mul_ref, silu_mul_triton, swiglu
from tests.unit.kernels.test_rmsnorm import DTYPES, near, random


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
def test_swiglu_has_the_bits_of_autograd(dtype, device):
    gate, up, grad = (random(3, 257, dtype=torch.float32, device=device).to(dtype) for _ in range(3))
    found, wanted = ([one.clone().requires_grad_() for one in (gate, up)] for _ in range(2))
    y, twin = swiglu(*found), F.silu(wanted[0]) * wanted[1]
    y.backward(grad)
    twin.backward(grad)
    assert torch.equal(y, twin)
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(found, wanted, strict=True))
