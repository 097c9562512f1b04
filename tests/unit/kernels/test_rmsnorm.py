"""rmsnorm: kernel, dispatch and twin agree, and with the torch code that training runs; what has no backward pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_spmd.kernels.rmsnorm import rmsnorm, rmsnorm_ref, rmsnorm_triton
from rlhf_spmd.kernels.silu_mul import silu_mul

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ULP = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def near(got: Tensor, expected: Tensor, *, ulps: float) -> None:
    """Checks that numbers agree within so many units of the last bit. Triton's interpreter cuts bfloat16 instead of
    rounding it: some more."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if got.dtype == torch.bfloat16 and not got.is_cuda:
        ulps += 3
    if not ulps:
        assert torch.equal(got, expected)
        return
    wide = expected.double()
    assert ((got.double() - wide).abs() <= ulps * ULP[got.dtype] * wide.abs().clamp_min(2.0**-6)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 257), (17, 64), (5, 2048), (2, 3000)])
@pytest.mark.parametrize("adds", [False, True])
def test_rmsnorm(dtype, num_rows, size, adds, device):
    x = random(num_rows, size + 3, dtype=dtype, device=device)[:, :size]  # a view
    residual = random(num_rows, size, dtype=dtype, device=device, seed=1) if adds else None
    weight = random(size, dtype=dtype, device=device, seed=2)
    y_ref, s_ref = rmsnorm_ref(x, weight, 1e-5, residual)
    near(y_ref, F.rms_norm(s_ref, (size,), weight, 1e-5), ulps=4 if dtype == torch.float32 else 1)
    assert torch.equal(s_ref, x + residual if adds else x)
    for norm in (rmsnorm, rmsnorm_triton):
        y, s = norm(x, weight, 1e-5, residual)
        near(s, s_ref, ulps=0)
        # Where a rounded sum went the other way, the row's statistics move with it.
        near(y, y_ref, ulps=4 if dtype == torch.float32 else 1)


def test_rmsnorm_of_heads_and_of_nothing(device):
    """The norms of queries and keys: rows [T, H] within a fused projection."""
    fused = random(5, 7, 24, dtype=torch.float32, device=device)
    weight = random(24, dtype=torch.float32, device=device, seed=1)
    for heads in (fused[:, :4], fused[:, 4:6]):
        y, same = rmsnorm_triton(heads, weight, 1e-6)
        assert same is heads
        near(y, F.rms_norm(heads, (24,), weight, 1e-6), ulps=4)
    y, _ = rmsnorm_triton(fused[:0], weight, 1e-6)
    assert y.shape == (0, 7, 24)


def test_what_has_no_backward_pass_refuses(device):
    """Losing a gradient in silence would be worse."""
    x, weight = torch.ones(2, 16, device=device, requires_grad=True), torch.ones(16, device=device)
    for call in (lambda: rmsnorm(x, weight, 1e-5), lambda: silu_mul(x, x)):
        with pytest.raises(AssertionError, match="backward"):
            call()
