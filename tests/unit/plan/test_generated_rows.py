"""The prompts that a copy computes: equal ones once, as the engine does."""

from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

from rlhf_spmd.algorithms.training_order import epoch_order
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.workload import Workload
from rlhf_spmd.runtime.generation.engine import Engine
from rlhf_spmd.runtime.generation.requests import Sampling
from tests.draws import random_responses
from tests.unit.runtime.generation.test_rollout import make_model

NUM_TOKENS = 3


def workload_of(algorithm: str, mini_batch: int, samples: int) -> Workload:
    """Returns a workload of 24 sequences, of prompts of 8 tokens."""
    sizes = (f"samples_per_prompt={samples}", f"rollout_batch={24 // samples}", f"mini_batch={mini_batch}")
    config = load("tiny", (*sizes, "micro_batch=1"), algorithm=algorithm)
    return replace(make_workload(config), max_prompt=8)


def prompts_of(workload: Workload, columns: range, iteration: int) -> np.ndarray:
    """Returns the prompts of these columns in the order of an iteration (runtime/run/prepare.py)."""
    prompt_N = np.arange(workload.rollout_batch).repeat(workload.samples_per_prompt)
    order_MC = epoch_order(0, iteration, 0, len(prompt_N), workload.mini_batch, group=workload.group_size)
    return prompt_N[order_MC][:, list(columns)].ravel()


@pytest.mark.parametrize(
    ("algorithm", "mini_batch", "samples"), [("grpo", 24, 4), ("grpo", 6, 4), ("grpo", 8, 8), ("ppo", 24, 1)]
)
@pytest.mark.parametrize("dp", [1, 2, 3, 5])
def test_samples_that_are_neighbours_share_a_prompt(algorithm, mini_batch, samples, dp):
    workload, layout = workload_of(algorithm, mini_batch, samples), Layout(tuple(range(dp)), dp=dp)
    for rank in layout.ranks:
        columns = layout.columns(rank, mini_batch)
        different = len(set(prompts_of(workload, columns, 0)))
        rows = workload.generated_rows(columns)
        assert sum(prompt > 0 for prompt, _ in rows) == workload.num_distinct_prompts(columns) == different
        assert len(rows) == len(columns) * workload.num_mini_batches and rows[0][0] == 8


def test_samples_in_a_random_order_are_expected_to_share_some():
    workload = workload_of("ppo", 12, 4)
    assert workload.group_size == 1, "the samples of a prompt are spread"
    for columns in (range(3), range(12)):
        found = fmean(len(set(prompts_of(workload, columns, number))) for number in range(300))
        assert workload.num_distinct_prompts(columns) == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("places", [24, 5])
def test_the_engine_computes_the_prompts_that_are_counted(places, monkeypatch):
    """At once and when rows take turns: samples begin while another one of their prompt runs."""
    workload, computed = workload_of("grpo", 24, 4), 0
    prompts = [[5 + index] * 8 for index in prompts_of(workload, range(24), 0)]
    engine = Engine(make_model(), longest=8 + 2 * NUM_TOKENS, max_sequences=places)
    forward = engine.decoder.round

    def counting(tokens_B, cached_B, prompts, *rest):
        nonlocal computed
        computed += sum(map(len, prompts))
        return forward(tokens_B, cached_B, prompts, *rest)

    monkeypatch.setattr(engine.decoder, "round", counting)
    sampling = [Sampling(NUM_TOKENS + row % 3) for row in range(24)]
    engine.submit(prompts, random_responses(24, 2 * NUM_TOKENS, 0), sampling)
    engine.run()
    assert computed == sum(prompt for prompt, _ in workload.generated_rows(range(24))) == 6 * 8
