"""Cutting rows into micro-batches, and how little is computed besides real tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.sequences import Sequences, forward, lengths_of
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.layout import Layout, cut
from rlhf_spmd.plan.shard import Shard
from tests.unit.model.test_attention import place

LARGEST_WASTE = 1.05  # tokens computed / real tokens


@given(lengths=st.lists(st.integers(1, 60), max_size=40), budget=st.integers(1, 80))
def test_a_budget_is_kept_and_no_row_is_lost(lengths, budget):
    parts = cut(lengths, Layout.data_parallel((0,), tokens=budget), micro_batch=3)
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(len(lengths)))
    for part, following in zip(parts, [*parts[1:], None], strict=False):
        held = sum(lengths[part])
        assert held <= budget or part.stop - part.start == 1  # a sequence is never cut
        assert following is None or held + lengths[following.start] > budget  # nor is room left for the next row


@given(num=st.integers(0, 40), size=st.integers(1, 9))
def test_without_a_budget_rows_are_counted(num, size):
    parts = cut([1] * num, Layout.data_parallel((0,)), micro_batch=size)
    assert [part.stop - part.start for part in parts[:-1]] == [size] * max(0, len(parts) - 1)
    assert sum(part.stop - part.start for part in parts) == num


def skewed_rows(num: int = 256, longest: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns prompts of 4 to 16 tokens; responses whose lengths are log-normal: most short, a few as long as may
    be."""
    generator = torch.Generator().manual_seed(0)
    prompt_B = torch.randint(4, 17, (num,), generator=generator)
    response_B = (torch.randn(num, generator=generator) * 1.0 + 2.2).exp().long().clamp(1, longest)
    prompts_BP = torch.where(torch.arange(16) < prompt_B[:, None], 3, -1)
    responses_BG = torch.where(torch.arange(longest) < response_B[:, None], 5, -1)
    return prompts_BP, responses_BG


@pytest.mark.parametrize("options", [{"micro_batch": 8}, {"tokens": 256}])
def test_nothing_is_computed_on_padding(options, monkeypatch):
    """Tokens that enter a matrix product, counted where they do, against real tokens; with padding it would be 3.5."""
    config = ModelConfig("llama", 32, 16, 24, 2, 2, 2, 8)
    model = Transformer(config, head="lm", seed=0)
    counted = []
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "down_proj")):
            module.register_forward_hook(lambda module, inputs, output: counted.append(inputs[0].shape[:-1].numel()))
    prompts_BP, responses_BG = skewed_rows()
    lengths = lengths_of(prompts_BP, responses_BG)
    parts = cut(lengths, Layout.data_parallel((0,), **options), options.get("micro_batch", 0))
    for part in parts:
        with torch.no_grad():
            forward(model, Sequences.join(prompts_BP[part], responses_BG[part]))
    computed, real = sum(counted) / 4, sum(lengths)  # two layers, two products each
    padded = sum(max(lengths[part]) * (part.stop - part.start) for part in parts)
    print(f"{options}: {computed / real:.3f} tokens computed per real one; padded rows {padded / real:.2f}")
    assert 1.0 <= computed / real <= LARGEST_WASTE < 1.5 < padded / real


@pytest.mark.parametrize("tp", [2, 3, 4, 8])
@pytest.mark.parametrize("options", [{"micro_batch": 8}, {"tokens": 256}])
def test_tensor_parallel_ranks_add_hardly_any(tp, options):
    """Their shares of the tokens are equal, so that a micro-batch is filled up to a multiple of tp."""
    prompts_BP, responses_BG = skewed_rows()
    lengths = lengths_of(prompts_BP, responses_BG)
    parts = cut(lengths, Layout.data_parallel((0,), **options), options.get("micro_batch", 0))
    config = ModelConfig("llama", 10, 8 * tp, tp, 1, tp, tp, 8)
    model = Transformer(config, head="lm", device="meta", parallel=place(Shard(tp=tp)))
    computed = sum(Sequences.join(prompts_BP[p], responses_BG[p]).context(model).num_tokens for p in parts)
    assert sum(lengths) <= computed <= LARGEST_WASTE * sum(lengths)
