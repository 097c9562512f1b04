"""Attention over a cache in blocks: twin, CPU path and kernel against torch's attention and one another."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_spmd.kernels import cpu
from rlhf_spmd.kernels.decode_attention import (
    Decode,
    decode_attention,
    decode_attention_ref,
    decode_attention_triton,
)

ATOL = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SHAPES = [  # rows, kv heads, group, head dim, block size
    (1, 1, 1, 16, 16),
    (3, 2, 3, 32, 16),
    (3, 1, 7, 80, 32),
    (17, 1, 1, 32, 16),
    (1, 3, 3, 128, 32),
    (3, 1, 17, 16, 16),
    (2, 2, 2, 24, 11),
    (2, 2, 1, 64, 16),
    (2, 1, 2, 256, 16),
]


class Case:
    """A cache, shuffled tables that share blocks, and a query per row."""

    def __init__(self, rows, kv_heads, group, head_dim, block_size, lengths, dtype=torch.float32, device="cpu"):
        generator = torch.Generator().manual_seed(len(lengths) + head_dim)
        longest = max(lengths)
        per_row = -(-longest // block_size) + 1  # the last entry lies beyond every row
        num_blocks = rows * per_row + 1
        shape = (num_blocks, kv_heads, block_size, head_dim)
        self.keys, self.values = (torch.randn(shape, generator=generator).to(dtype).to(device) for _ in range(2))
        self.q = torch.randn(rows, kv_heads * group, head_dim, generator=generator).to(dtype).to(device)
        tables = torch.randperm(num_blocks, generator=generator)[: rows * per_row].view(rows, per_row).int()
        tables[:, 0] = tables[0, 0]  # a prompt block that all rows share
        self.lengths = torch.tensor((lengths * rows)[:rows], dtype=torch.int32)
        starts = torch.arange(per_row) * block_size
        tables[starts >= self.lengths[:, None]] = 2**30  # may hold anything
        self.tables, self.lengths, self.block_size = tables.to(device), self.lengths.to(device), block_size

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return self.q, self.keys, self.values, self.tables, self.lengths

    def dispatched(self, window: int | None = None, cap: float | None = None) -> Tensor:
        step = Decode.prepare(self.tables, self.lengths, self.block_size, self.q.dtype)
        return decode_attention(self.q, self.keys, self.values, step, window=window, cap=cap)


def by_sdpa(case: Case, window: int | None, cap: float | None = None) -> Tensor:
    """Computes torch's attention in float64, row by row, over the row's tokens laid out in a line; with a cap the
    formula."""
    group = case.q.shape[1] // case.keys.shape[1]
    rows = []
    for b, length in enumerate(case.lengths.tolist()):
        if not length:
            rows.append(torch.zeros_like(case.q[b], dtype=torch.float64))
            continue
        blocks = case.tables[b, : -(-length // case.block_size)].long()
        keys, values = (cache[blocks].double().transpose(0, 1).flatten(1, 2) for cache in (case.keys, case.values))
        kept = slice(max(length - window, 0) if window else 0, length)
        keys, values = (x[:, kept].repeat_interleave(group, 0) for x in (keys, values))
        query = case.q[b].double()[:, None]
        if cap is None:
            rows.append(F.scaled_dot_product_attention(query, keys, values)[:, 0])
        else:
            scores = torch.tanh(query @ keys.mT / math.sqrt(query.shape[-1]) / cap) * cap
            rows.append((scores.softmax(-1) @ values)[:, 0])
    return torch.stack(rows)


def lengths_around(block_size: int) -> list[int]:
    return [block_size + 1, 1, block_size, block_size - 1, 5 * block_size + 3]


def close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected.double(), atol=ATOL[dtype], rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 1, 20])
def test_twin_and_dispatch_equal_torchs_attention(shape, window, device):
    case = Case(*shape, lengths_around(shape[-1]), device=device)
    exact = by_sdpa(case, window)
    close(decode_attention_ref(*case.arguments, window=window), exact, torch.float32)
    close(case.dispatched(window), exact, torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_parts", [None, 1, 4])
def test_kernel_equals_the_twin(shape, num_parts, device):
    case = Case(*shape, lengths_around(shape[-1]), device=device)
    close(decode_attention_triton(*case.arguments, num_parts=num_parts), by_sdpa(case, None), torch.float32)


@pytest.mark.parametrize("window", [1, 16, 70, 1000])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_windows(window, num_parts, device):
    case = Case(3, 2, 2, 32, 16, [150, 16, 71], device=device)
    close(
        decode_attention_triton(*case.arguments, window=window, num_parts=num_parts),
        by_sdpa(case, window),
        case.q.dtype,
    )


@pytest.mark.parametrize(("cap", "dtype"), [(0.5, torch.float32), (50.0, torch.bfloat16)])
def test_caps(cap, dtype, device, monkeypatch):
    """Kernel, twin and dispatch, also where the kernels in C++ would run, which have no cap."""
    monkeypatch.setattr(cpu, "_used", {torch.float32})
    case = Case(3, 1, 3, 16, 16, [90, 1, 0], dtype, device=device)
    for window in (None, 20):
        exact, without = by_sdpa(case, window, cap), by_sdpa(case, window)
        assert (exact - without).abs().max() > (0.1 if cap < 1 else 1e-5)
        close(decode_attention_ref(*case.arguments, window=window, cap=cap), exact, dtype)
        close(case.dispatched(window, cap), exact, dtype)
        got = decode_attention_triton(*case.arguments, window=window, cap=cap, num_parts=1 if window else 2)
        close(got, exact, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_parts", [1, 4])
def test_half_precision(dtype, num_parts, device):
    case = Case(3, 2, 3, 80, 16, [150, 1, 33], dtype, device)
    close(decode_attention_triton(*case.arguments, num_parts=num_parts), by_sdpa(case, None), dtype)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_rows_of_length_zero_give_zeros(num_parts, device):
    case = Case(4, 2, 2, 16, 16, [0, 20, 0, 1], device=device)
    exact = by_sdpa(case, None)
    for got in (decode_attention_triton(*case.arguments, num_parts=num_parts), case.dispatched(), case.dispatched(5)):
        assert not got[0].any() and not got[2].any() and got[1].any()
    close(case.dispatched(), exact, torch.float32)
    case.lengths.zero_()
    assert not case.dispatched().any() and not decode_attention_ref(*case.arguments).any()


def test_kernel_reads_no_slot_beyond_a_length(device):
    """A fresh cache is not cleared: what lies beyond a row must not matter, not even NaN times zero."""
    case = Case(2, 1, 2, 16, 16, [21, 5], device=device)
    expected = decode_attention_triton(*case.arguments)
    case.keys[case.tables[0, 1].long(), :, 5:] = torch.nan
    case.values[case.tables[0, 1].long(), :, 5:] = torch.nan
    assert torch.equal(decode_attention_triton(*case.arguments), expected)


@pytest.mark.parametrize("window", [None, 9])
def test_one_block_per_row_is_read_in_place(window, device):
    case = Case(3, 2, 2, 16, 64, [64, 7, 33], device=device)
    case.tables = torch.arange(3, dtype=torch.int32, device=device)[:, None]
    step = Decode.prepare(case.tables, case.lengths, 64, torch.float32)
    if device == "cpu":
        assert step.in_place and step.gather(case.keys).data_ptr() == case.keys.data_ptr()
    got = decode_attention(case.q, case.keys, case.values, step, window=window)
    close(got, decode_attention_ref(*case.arguments, window=window), torch.float32)


def test_a_step_is_shared_by_layers_with_and_without_windows(device):
    case = Case(3, 2, 2, 16, 16, [40, 7, 33], device=device)
    step = Decode.prepare(case.tables, case.lengths, 16, torch.float32)
    for window in (None, 8, None, 8, 100):
        got = decode_attention(case.q, case.keys, case.values, step, window=window)
        close(got, decode_attention_ref(*case.arguments, window=window), torch.float32)


def test_strided_inputs(device):
    """q is a view of a fused projection, and keys and values lie interleaved in one cache."""
    case = Case(3, 2, 3, 32, 16, [40, 16, 5], device=device)
    expected = by_sdpa(case, None)
    case.q = torch.cat((case.q, torch.full_like(case.q, torch.nan)), dim=1)[:, :6]
    both = torch.stack((case.keys, case.values), dim=2)
    case.keys, case.values = both[:, :, 0], both[:, :, 1]
    close(decode_attention_triton(*case.arguments, num_parts=1), expected, torch.float32)
    close(decode_attention_triton(*case.arguments, num_parts=2), expected, torch.float32)
    assert not case.keys.is_contiguous()
    close(case.dispatched(), expected, torch.float32)
