"""kv_write: kernel, dispatch and twin write the same cache."""

import pytest
import torch

from rlhf_spmd.kernels.kv_write import kv_write, kv_write_ref, kv_write_triton
from tests.unit.kernels.test_rmsnorm import DTYPES, random


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
