"""Drawing from a vocabulary split over ranks: every rank gets the token, numbers and sampling support of whole rows.

python tests/run_mpi.py 2 4 5 8 -- tests/mpi/test_sample_shard.py
"""

import pytest
import torch
import torch.distributed as dist

from rlhf_spmd.kernels.sample import sample, sample_ref
from rlhf_spmd.kernels.sample_shard import gather_slices, sample_shard
from tests.draws import random_rows

pytestmark = pytest.mark.mpi(min_size=2)

RULES = {
    "open": {},
    "warm": {"temperature": 1.7},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 30, "temperature": 0.8},
    "small nucleus": {"top_p": 0.6},
    "wide nucleus": {"top_p": 0.98, "temperature": 4.0},
    "min-p": {"min_p": 0.02},
    "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "stored": {"num_stored": 24, "top_p": 0.9},
    "stored, greedy": {"num_stored": 3, "temperature": 0.0},
}
WIDTHS = {37: "a few each", 1100: "blocks that are cut", 5003: "many blocks"}


def slice_of(vocab_size: int, rank: int, size: int) -> range:
    """Returns a slice of the vocabulary: uneven, and not where blocks begin; the first slice is narrow."""
    edges = [0, *(3 + (vocab_size - 3) * i // (size - 1) for i in range(size - 1)), vocab_size] if size > 1 else []
    return range(edges[rank], edges[rank + 1])


def make_rows(num_rows: int, vocab_size: int, dtype: torch.dtype, seed: int):
    generator = torch.Generator().manual_seed(seed)
    logits_BV = (3 * torch.randn(num_rows, vocab_size, generator=generator)).to(dtype)
    return logits_BV, random_rows(num_rows, seed)


def draw(world, group, logits_BV, bits_B, **rules):
    vocab_size = logits_BV.shape[1]
    slices = [slice_of(vocab_size, rank, world.size) for rank in range(world.size)]
    mine = slices[world.rank]
    return sample_shard(logits_BV[:, mine.start : mine.stop], bits_B, slices=slices, group=group, **rules)


def assert_same_everywhere(sampled, group, size: int) -> None:
    for field in sampled:
        if field is not None:
            parts = [torch.empty_like(field) for _ in range(size)]
            dist.all_gather(parts, field.contiguous(), group=group)
            assert all(torch.equal(part, parts[0]) for part in parts)


def assert_drawn_alike(sampled, whole) -> None:
    assert torch.equal(sampled.tokens_B, whole.tokens_B)
    for field, expected in zip(sampled[1:4], whole[1:4], strict=True):
        assert field.dtype == expected.dtype
        torch.testing.assert_close(field, expected, atol=4e-6, rtol=4e-6, equal_nan=True)
    assert (sampled.support_BK is None) == (whole.support_BK is None)
    if whole.support_BK is not None:
        assert torch.equal(sampled.support_BK, whole.support_BK)


@pytest.mark.parametrize("vocab_size", WIDTHS)
def test_gathered_slices_are_whole_rows(world, make_group, vocab_size):
    """What ranks with a GPU draw from; to the bit, so that sample() draws there what it draws anywhere."""
    slices = [slice_of(vocab_size, rank, world.size) for rank in range(world.size)]
    mine = slices[world.rank]
    for dtype in (torch.float32, torch.bfloat16):
        logits_BV, _ = make_rows(7, vocab_size, dtype, seed=vocab_size)
        whole_BV = gather_slices(logits_BV[:, mine.start : mine.stop], slices, make_group(range(world.size)))
        assert torch.equal(whole_BV, logits_BV) and whole_BV.is_contiguous()


@pytest.mark.rotates
@pytest.mark.parametrize("vocab_size", WIDTHS)
@pytest.mark.parametrize("name", RULES)
def test_equals_whole_rows(world, make_group, name, vocab_size):
    group = make_group(range(world.size))
    for dtype in (torch.float32, torch.float64):
        rows = make_rows(40, vocab_size, dtype, seed=vocab_size)
        sampled = draw(world, group, *rows, **RULES[name])
        assert_same_everywhere(sampled, group, world.size)
        assert_drawn_alike(sampled, sample(*rows, **RULES[name]))
        assert_drawn_alike(sampled, sample_ref(*rows, **RULES[name]))


def test_rules_of_each_row_and_equal_logits(world, make_group):
    """bfloat16 has many equal logits, all over the slices; rows that keep all stand among rows that keep some."""
    group = make_group(range(world.size))
    logits_BV, bits_B = make_rows(60, 1500, torch.bfloat16, seed=1)
    rules = {
        "temperature": torch.tensor([1.0, 0.0, 0.7]).repeat(20),
        "top_k": torch.tensor([0, 0, 10, 0, 3]).repeat(12),
        "top_p": torch.tensor([1.0, 1.0, 0.9, 0.5]).repeat(15),
    }
    for num_stored in (0, 7):
        sampled = draw(world, group, logits_BV, bits_B, num_stored=num_stored, **rules)
        assert_same_everywhere(sampled, group, world.size)
        assert_drawn_alike(sampled, sample(logits_BV, bits_B, num_stored=num_stored, **rules))


def test_banned_slices_and_broken_rows(world, make_group):
    group = make_group(range(world.size))
    logits_BV, bits_B = make_rows(6, 1100, torch.float32, seed=2)
    last = slice_of(1100, world.size - 1, world.size)
    logits_BV[0, : last.start] = -torch.inf  # only the last slice has anything
    logits_BV[1, last.start :] = -torch.inf
    logits_BV[2] = -torch.inf
    logits_BV[3, 5], logits_BV[4, 1099] = torch.nan, torch.inf
    for rules in ({}, {"top_k": 5}, {"temperature": 0.0}, {"num_stored": 4}):
        sampled = draw(world, group, logits_BV, bits_B, **rules)
        assert ((sampled.tokens_B >= 0) & (sampled.tokens_B < 1100)).all()
        good = torch.tensor([0, 1, 5])
        whole = sample(logits_BV[good], bits_B[good], **rules)
        assert_drawn_alike(type(sampled)(*(x if x is None else x[good] for x in sampled)), whole)
        for field in sampled[1:4]:
            assert field[2:5].isnan().all()


@pytest.mark.parametrize("name", RULES)
def test_empty_slices(world, make_group, name):
    """Of a model with more rows of embeddings than tokens: the last ranks have no token, also where a block ends."""
    group = make_group(range(world.size))
    for vocab_size in (37, 512):
        edges = (
            [0, vocab_size // 2, *[vocab_size] * (world.size - 1)] if world.size > 2 else [0, vocab_size, vocab_size]
        )
        slices = [range(*edges[rank : rank + 2]) for rank in range(world.size)]
        mine, (logits_BV, bits_B) = slices[world.rank], make_rows(9, vocab_size, torch.float32, seed=4)
        part_Bv = logits_BV[:, mine.start : mine.stop]
        sampled = sample_shard(part_Bv, bits_B, slices=slices, group=group, **RULES[name])
        assert_same_everywhere(sampled, group, world.size)
        assert_drawn_alike(sampled, sample(logits_BV, bits_B, **RULES[name]))
