"""The C++ kernels for CPUs against their references, and the promise that a row's bits are its own."""

import math

import pytest
import torch
from torch import Tensor

from rlhf_spmd.kernels import cpu
from rlhf_spmd.kernels.cdf_tree import BLOCK
from rlhf_spmd.kernels.decode_attention import decode_attention_ref
from rlhf_spmd.kernels.kv_write import kv_write_ref
from rlhf_spmd.kernels.rmsnorm import rmsnorm_ref
from rlhf_spmd.kernels.rope import rope_ref
from rlhf_spmd.kernels.sample_cpu import block_masses
from rlhf_spmd.kernels.silu_mul import silu_mul_ref

pytestmark = pytest.mark.skipif(bool(cpu.problem()), reason=cpu.problem() or "-")
SHAPES = [(1, 5, 7), (33, 576, 100), (2, 193, 24), (600, 400, 50), (13, 96, 48)]  # rows, inputs, outputs
in_both = pytest.mark.parametrize("dtype", cpu.DTYPES, ids=str)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(mine: Tensor, exact: Tensor, *, eps: float) -> bool:
    """Checks that the difference is within eps of the largest number, beyond what the dtype rounds."""
    room = eps + torch.finfo(mine.dtype).eps * (mine.dtype == torch.bfloat16)
    return bool((mine.double() - exact.double()).abs().max() <= room * exact.double().abs().max())


@in_both
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_near_float64_and_packing_keeps_its_bits(shape, dtype):
    num_rows, num_in, num_out = shape
    x, weight, bias = (draw(*size, dtype=dtype) for size in ((num_rows, num_in), (num_out, num_in), (num_out,)))
    plain = cpu.product(x, weight, bias)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    assert near(plain, exact, eps=1e-6)
    packed = cpu.pack(weight)
    assert torch.equal(cpu.product(x, packed, bias), plain)
    strided = torch.cat((x, x), dim=1)[:, num_in:]
    assert torch.equal(cpu.product(strided, packed, bias), plain)


@in_both
def test_a_row_has_the_same_bits_alone_among_others_and_with_other_threads(dtype):
    x, weight = draw(520, 200, dtype=dtype), draw(70, 200, dtype=dtype)
    whole = cpu.product(x, weight)
    for rows in (slice(0, 1), slice(519, 520), slice(3, 8), slice(100, 132)):
        assert torch.equal(cpu.product(x[rows], weight), whole[rows])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(cpu.product(x, weight), whole)
    finally:
        torch.set_num_threads(threads)


@in_both
@pytest.mark.parametrize("size", [16, 70])
def test_norms(size, dtype):
    x, residual, weight = (draw(*shape, dtype=dtype) for shape in ((5, size), (5, size), (size,)))
    for added in (None, residual):
        for mine, reference in zip(
            cpu.rmsnorm(x, weight, 1e-5, added), rmsnorm_ref(x, weight, 1e-5, added), strict=True
        ):
            assert near(mine, reference, eps=1e-6)
    heads = draw(5, 9, size, dtype=dtype)[:, 2:6]
    assert near(cpu.rmsnorm(heads, weight, 1e-5)[0], rmsnorm_ref(heads, weight, 1e-5)[0], eps=1e-6)


@in_both
@pytest.mark.parametrize("head_dim", [6, 64])
def test_rotations_have_the_bits_of_training(head_dim, dtype):
    joined = draw(7, 5, head_dim, dtype=dtype)
    q, k = joined[:, :3], joined[:, 3:]
    cos, sin = (draw(7, head_dim // 2, dtype=dtype, seed=seed) for seed in (1, 2))
    mine, reference = (cpu.rotate(q, cos, sin), cpu.rotate(k, cos, sin)), rope_ref(q, k, cos, sin)
    assert all(map(torch.equal, mine, reference))


@in_both
def test_gates(dtype):
    gate, up = draw(7, 100, dtype=dtype) * 20, draw(7, 100, dtype=dtype, seed=1)
    gate[0, :4] = torch.tensor([0.0, -100.0, 100.0, -math.inf])
    mine, reference = cpu.silu_mul(gate, up), silu_mul_ref(gate, up)
    mine[0, 3] = reference[0, 3] = 0  # -inf / inf
    assert near(mine, reference, eps=1e-6)


@in_both
def test_cache_writes_and_attention(dtype):
    for head_dim in (16, 64, 80):
        keys, values = (draw(9, 2, 8, head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
        new, slots = draw(3, 2, head_dim, dtype=dtype), torch.tensor([70, -1, 9])
        written = keys.clone(), values.clone()
        kv_write_ref(new, new, *written, slots)
        for mine, reference in zip((keys, values), written, strict=True):
            cpu.kv_write(new, mine, slots)
            assert torch.equal(mine, reference)
        q = draw(3, 6, head_dim, dtype=dtype)
        tables, lengths = torch.tensor([[1, 2, 3], [4, 5, 6], [0, 7, 8]], dtype=torch.int32), torch.tensor([20, 0, 9])
        for window in (None, 5, 100):
            mine = cpu.decode_attention(q, keys, values, tables, lengths, window)
            assert near(mine, decode_attention_ref(q, keys, values, tables, lengths, window=window), eps=1e-6)
            alone = cpu.decode_attention(q[2:], keys, values, tables[2:], lengths[2:], window)
            assert torch.equal(alone, mine[2:])


@in_both
def test_masses_of_blocks(dtype):
    logits = draw(5, 1300, dtype=dtype) * 3
    logits[1, 7], logits[2], logits[3, 1], logits[4, 9] = -math.inf, -math.inf, math.nan, math.inf
    temperature, least = torch.tensor([1.0, 0.7, 1.0, 1.0, 2.0]), torch.tensor([0.0, -1.0, -1.0, -1.0, 0.0])
    for options in ({}, {"offset": 100}, {"least_B": least}):
        max_B, masses_BN = cpu.block_masses(logits, temperature, BLOCK, **options)
        expected_max_B, expected_BN = block_masses(logits, temperature, **options)
        assert torch.equal(max_B[[0, 1, 2, 4]], expected_max_B[[0, 1, 2, 4]])
        assert masses_BN[3:].sum(1).isnan().all() and expected_BN[3:].sum(1).isnan().all()
        torch.testing.assert_close(masses_BN[:3], expected_BN[:3], rtol=1e-5, atol=1e-30)
        assert masses_BN[2].sum() == 0


@pytest.mark.skipif(cpu.INSTRUCTIONS != "avx512", reason="this processor has one set of instructions")
def test_instruction_sets_give_the_same_bits():
    def results() -> list[Tensor]:
        found = []
        for dtype in cpu.DTYPES:
            x, weight = draw(33, 300, dtype=dtype), draw(100, 300, dtype=dtype)
            cache, q = draw(2, 2, 32, 64, dtype=dtype), draw(2, 6, 64, dtype=dtype)
            tables, lengths = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([32, 21])
            found += [cpu.product(x, weight), *cpu.rmsnorm(x, weight[0].contiguous(), 1e-5), cpu.silu_mul(x, x)]
            found += [cpu.decode_attention(q, cache, cache, tables, lengths, None)]
            found += cpu.block_masses(x, torch.ones(33), BLOCK)
        return found

    wide = results()
    try:
        assert cpu._native.use("avx2")
        assert all(map(torch.equal, results(), wide))
    finally:
        cpu._native.use(cpu.INSTRUCTIONS)
