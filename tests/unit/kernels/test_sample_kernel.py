"""The Triton form of sample() against its twin and the CPU form: the same tokens, numbers and sampling supports."""

import pytest
import torch

pytest.importorskip("triton")

from rlhf_spmd.kernels.sample import sample, sample_ref, sample_triton
from rlhf_spmd.kernels.support import make_rules
from tests.draws import random_rows
from tests.edges import edge_distances

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "num_stored": 0}
RULES = {
    "top-k": {"top_k": 30, "temperature": 0.8},
    "top-p": {"top_p": 0.9},
    "nearly all": {"top_p": 0.999, "temperature": 2.0},
    "min-p": {"min_p": 0.05},
    "all": {"top_k": 40, "top_p": 0.8, "min_p": 0.1},
    "greedy": {"temperature": 0.0},
    "stored": {"num_stored": 20, "top_p": 0.95},
    "stored, min-p": {"num_stored": 4, "min_p": 0.001},
    "stored, greedy": {"num_stored": 3, "temperature": 0.0},
}


def make_rows(num_rows: int, vocab_size: int, dtype, device: str, seed: int = 0):
    generator = torch.Generator().manual_seed(seed + vocab_size)
    logits_BV = 3 * torch.randn(num_rows, vocab_size, generator=generator)
    bits_B = random_rows(num_rows, seed)
    return logits_BV.to(device, dtype), bits_B.to(device)


def launch(logits_BV, bits_B, *, restricted: bool = True, **rules):
    rules = OFF | rules
    return sample_triton(logits_BV, bits_B, make_rules(logits_BV, **rules), rules["num_stored"], restricted)


def assert_same(sampled, expected, rows_B=slice(None)) -> None:
    assert torch.equal(sampled.tokens_B[rows_B], expected.tokens_B[rows_B])
    for field, other in zip(sampled[1:4], expected[1:4], strict=True):
        assert field.dtype == torch.float32
        torch.testing.assert_close(field[rows_B], other[rows_B], atol=5e-6, rtol=1e-5)
    assert (sampled.support_BK is None) == (expected.support_BK is None)
    if expected.support_BK is not None:
        assert torch.equal(sampled.support_BK[rows_B], expected.support_BK[rows_B])


WHOLE = [  # each type at two sizes or three, each size in one type; the others with `-m slow`
    pytest.param(size, dtype, marks=[] if j % 3 == k else pytest.mark.slow)
    for j, size in enumerate((1, 7, 511, 512, 513, 4097, 9 * 512 + 3))
    for k, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16))
]


@pytest.mark.parametrize(("vocab_size", "dtype"), WHOLE)
def test_rows_that_keep_everything(vocab_size, dtype, device):
    num_rows = 2000 if device == "cuda" else 8
    for temperature in (1.0, 0.7):
        logits_BV, bits_B = make_rows(num_rows, vocab_size, dtype, device)
        sampled = launch(logits_BV, bits_B, temperature=temperature, restricted=False)
        twin = sample_ref(logits_BV, bits_B, temperature=temperature)
        distances_B = edge_distances(logits_BV.cpu().float(), bits_B.cpu(), twin.tokens_B.cpu(), temperature)
        sure_B = (distances_B > 1e-6).to(device)
        assert sure_B.float().mean() > 0.98
        assert_same(sampled, twin, sure_B)
        assert (sampled.support_mass_B == 1).all()


SIZES = (1, 40, 513, 2003)
SOME = [  # each rule at many tokens in one type, and at few in the other; the others with `-m slow`
    pytest.param(name, size, dtype, marks=[] if (i + k) % 2 == (j == 3) and j in (1 + i % 2, 3) else pytest.mark.slow)
    for i, name in enumerate(RULES)
    for j, size in enumerate(SIZES)
    for k, dtype in enumerate((torch.float32, torch.bfloat16))
]


@pytest.mark.parametrize(("name", "vocab_size", "dtype"), SOME)
def test_rows_that_keep_some(name, vocab_size, dtype, device):
    num_rows = 500 if device == "cuda" else 3
    rows = make_rows(num_rows, vocab_size, dtype, device, seed=1)
    twin = sample_ref(*rows, **RULES[name])
    sampled = launch(*rows, **RULES[name])
    # where a sum is at the edge of top_p, rounding decides whether a token is kept: the masses then differ
    same_B = (sampled.support_mass_B - twin.support_mass_B).abs() < 4e-6
    assert same_B.float().mean() > 0.99
    assert_same(sampled, twin, same_B)


def test_rules_of_each_row(device):
    """One batch, rules row by row; the form for CPUs draws the same."""
    num_rows = 480 if device == "cuda" else 12
    logits_BV, bits_B = make_rows(num_rows, 700, torch.float32, device, seed=2)
    repeats = num_rows // 12
    rules = {
        "temperature": torch.tensor([1.0, 0.0, 0.7, 3.0]).repeat(3 * repeats),
        "top_k": torch.tensor([0, 5, 0]).repeat(4 * repeats),
        "top_p": torch.tensor([1.0, 0.9]).repeat(6 * repeats),
        "min_p": torch.tensor([0.0] * 5 + [0.1]).repeat(2 * repeats),
    }
    for num_stored in (0, 10):
        sampled = launch(logits_BV, bits_B, **rules, num_stored=num_stored)
        on_cpu = sample(logits_BV.cpu(), bits_B.cpu(), **rules, num_stored=num_stored)
        assert_same(type(sampled)(*(x if x is None else x.cpu() for x in sampled)), on_cpu)


def test_equals_infinities_and_zeros(device):
    """Equal logits all over, 0 and -0, -inf, rows with nothing or NaN in them; rows that lie apart in memory."""
    generator = torch.Generator().manual_seed(4)
    wide_BV = (torch.randint(0, 3, (8, 900), generator=generator).float() - 1) * 0.4
    wide_BV[:, ::7] = -0.0
    wide_BV[3, 100:] = -torch.inf
    wide_BV[4], wide_BV[5, 9], wide_BV[6, 9] = -torch.inf, torch.nan, torch.inf
    wide_BV = wide_BV.to(device)
    logits_BV, bits_B = wide_BV[:, :603], random_rows(8).to(device)
    sound_B = torch.tensor([0, 1, 2, 3, 7], device=device)
    for rules in ({}, {"top_k": 50}, {"top_p": 0.37}, {"min_p": 0.9}, {"num_stored": 9}, {"temperature": 0.0}):
        sampled, twin = launch(logits_BV, bits_B, **rules), sample_ref(logits_BV, bits_B, **rules)
        assert_same(sampled, twin, sound_B)
        assert ((sampled.tokens_B >= 0) & (sampled.tokens_B < 603)).all()
        for field in sampled[1:4]:
            assert field[4:7].isnan().all()


def test_values_of_any_size(device):
    """The search ends and is exact from the smallest floats to the largest."""
    exponents = torch.linspace(-44, 38, 700, dtype=torch.float64)
    logits = torch.cat((-(10.0**exponents), torch.zeros(1, dtype=torch.float64), 10 ** exponents[:350])).float()
    logits_BV = logits[torch.randperm(len(logits), generator=torch.Generator().manual_seed(5))].expand(6, -1).to(device)
    bits_B = random_rows(6).to(device)
    for top_k in (2, 352, 1050):
        sampled = launch(logits_BV, bits_B, top_k=top_k, num_stored=1100)
        assert torch.equal(sampled.support_BK, sample_ref(logits_BV, bits_B, top_k=top_k, num_stored=1100).support_BK)


def test_dispatch(device):
    """sample() itself, and an empty batch."""
    rows = make_rows(4, 600, torch.float32, device)
    for rules in ({}, {"top_k": 3}, {"temperature": 0.0}, {"top_p": torch.full((4,), 0.5)}):
        assert_same(sample(*rows, **rules), sample_ref(*rows, **rules))
    empty = launch(rows[0][:0], rows[1][:0], num_stored=2)
    assert empty.tokens_B.shape == (0,) and empty.support_BK.shape == (0, 2)
