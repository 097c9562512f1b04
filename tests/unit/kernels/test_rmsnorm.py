"""rmsnorm: kernel, dispatch and twin agree, and with the torch code that training runs; what has no backward pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rlhf_spmd.kernels.rmsnorm
from rlhf_spmd.kernels import triton_import
from rlhf_spmd.kernels.rmsnorm import rmsnorm, rmsnorm_ref, rmsnorm_triton

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
    weight = random(size, dtype=torch.float32 if adds else dtype, device=device, seed=2)
    y_ref, s_ref = rmsnorm_ref(x, weight, 1e-5, residual)
    near(
        y_ref,
        F.rms_norm(s_ref.to(weight.dtype), (size,), weight, 1e-5).to(dtype),
        ulps=4 if dtype == torch.float32 else 1,
    )
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 257), (17, 64), (5, 2048), (2, 3000), (9, 1024), (5, 4, 24)])
@pytest.mark.parametrize("adds", [False, True])
def test_backward(dtype, shape, adds, device, monkeypatch):
    """The kernel against the derivative of the formula in float64. Programs take several rows."""
    monkeypatch.setattr(triton_import, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(rlhf_spmd.kernels.rmsnorm, "PROGRAMS", 2)
    whole = random(*shape[:-1], shape[-1] + 3, dtype=dtype, device=device)
    weight = random(shape[-1], dtype=torch.float32 if adds else dtype, device=device, seed=2)
    residual = random(*shape, dtype=dtype, device=device, seed=1)
    leaves = [whole, weight, *([residual] if adds else [])]
    wide = [one.double().requires_grad_() for one in leaves]
    leaves = [one.requires_grad_() for one in leaves]

    def loss(norm, x, weight, residual=None):
        y, s = norm(x[..., :-3], weight, 1e-5, residual)
        ends = (y.sin(), s.sin()) if adds else (y.sin(),)
        return sum(end.double().sum() for end in ends)

    found = torch.autograd.grad(loss(rmsnorm, *leaves), leaves)
    wanted = torch.autograd.grad(loss(rmsnorm_ref, *wide), wide)
    tolerance = 1e-4 if dtype == torch.float32 else 0.04
    for leaf, got, x in zip(leaves, found, wanted, strict=True):
        assert got.dtype == leaf.dtype
        assert (got.double() - x).norm() <= tolerance * x.norm() + 1e-6
    frozen = torch.autograd.grad(loss(rmsnorm, leaves[0], weight.detach(), *leaves[2:]), leaves[:1])
    assert torch.equal(frozen[0], found[0])


def test_a_sum_that_nothing_reads(device, monkeypatch):
    """The last norm has no gradient of x + residual."""
    monkeypatch.setattr(triton_import, "DEVICES", ("cpu", "cuda"))
    x, residual = (random(3, 24, dtype=torch.float32, device=device, seed=at).requires_grad_() for at in range(2))
    weight = random(24, dtype=torch.float32, device=device, seed=2)
    y, _ = rmsnorm(x, weight, 1e-5, residual)
    found = torch.autograd.grad(y.sin().sum(), [x, residual])
    assert torch.equal(*found)
    (wanted,) = torch.autograd.grad(rmsnorm_ref(x, weight, 1e-5, residual)[0].sin().sum(), [x])
    torch.testing.assert_close(found[0], wanted)
