"""kv_write, rmsnorm, rope and silu_mul: kernel, dispatch and twin agree, and with the torch code that training runs."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_spmd.kernels.kv_write import kv_write, kv_write_ref, kv_write_triton
from rlhf_spmd.kernels.rmsnorm import rmsnorm, rmsnorm_ref, rmsnorm_triton
from rlhf_spmd.kernels.rope import rope, rope_ref, rope_triton, rotate
from rlhf_spmd.kernels.silu_mul import TILE, silu_mul, silu_mul_ref, silu_mul_triton

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ULP = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def near(got: Tensor, expected: Tensor, *, ulps: float) -> None:
    """Within so many units of the last bit. Triton's interpreter cuts bfloat16 instead of rounding it: some more."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if got.dtype == torch.bfloat16 and not got.is_cuda:
        ulps += 3
    if not ulps:
        assert torch.equal(got, expected)
        return
    wide = expected.double()
    assert ((got.double() - wide).abs() <= ulps * ULP[got.dtype] * wide.abs().clamp_min(2.0**-6)).all()


@pytest.mark.parametrize("write", [kv_write, kv_write_triton])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim", "block_size"), [(1, 16, 16), (3, 24, 11), (2, 80, 32)])
def test_kv_write(write, dtype, heads, head_dim, block_size, device):
    """Scattered slots, some nowhere; keys and values are views of one projection; every other slot stays as it was."""
    num_blocks, num_tokens = 5, 9
    fused = random(num_tokens, 2 * heads, head_dim, dtype=dtype, device=device)
    keys, values = fused[:, :heads], fused[:, heads:]
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(1))[:num_tokens]
    slots[[2, 5]] = -1
    cache = random(2, num_blocks, heads, block_size, head_dim, dtype=dtype, device=device, seed=1)
    expected = cache.clone()
    kv_write_ref(keys, values, *expected, slots)
    assert not torch.equal(cache, expected)
    write(keys, values, *cache, slots.to(device))
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("write", [kv_write, kv_write_triton])
def test_kv_write_into_a_strided_cache_and_of_nothing(write, device):
    keys, values = random(2, 4, 2, 16, dtype=torch.float32, device=device)
    both = torch.zeros(3, 2, 2, 16, 16, device=device)  # keys and values of a block side by side
    slots = torch.tensor([47, 0, 16, 5], device=device)
    write(keys, values, both[:, 0], both[:, 1], slots)
    assert torch.equal(both[2, 0, :, 15], keys[0]) and torch.equal(both[1, 1, :, 0], values[2])
    assert both.count_nonzero() == 2 * keys.numel()
    before = both.clone()
    write(keys, values, both[:, 0], both[:, 1], torch.full_like(slots, -1))
    write(keys[:0], values[:0], both[:, 0], both[:, 1], slots[:0])
    assert torch.equal(both, before)


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


def test_what_has_no_backward_pass_refuses(device):
    """Losing a gradient in silence would be worse."""
    x, weight = torch.ones(2, 16, device=device, requires_grad=True), torch.ones(16, device=device)
    for call in (lambda: rmsnorm(x, weight, 1e-5), lambda: silu_mul(x, x)):
        with pytest.raises(AssertionError, match="backward"):
            call()
