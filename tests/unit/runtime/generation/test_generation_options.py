"""The options of generation in whole iterations: which of them change tokens, and which only speed or memory."""

import json

import pytest
import torch

from rlhf_spmd.config import presets
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.runtime.execute.handlers.generate import cache_share
from rlhf_spmd.runtime.run.samples import sample_responses
from tests.folders import WORDS, write_all
from tests.runs import RunOf, load

EOS_IDS = tuple(range(1, 6))


@pytest.fixture(scope="module")
def overrides(tmp_path_factory) -> list[str]:
    return write_all(tmp_path_factory.mktemp("generation"), eos_token_ids=EOS_IDS)


def responses_of(overrides: list[str], *more: str) -> tuple[torch.Tensor, dict]:
    run = RunOf(load(overrides, *more))
    metrics = run.iteration()
    return run.data.store["responses"].flatten(0, 1), metrics


@pytest.mark.parametrize(
    "options",
    [["max_sequences=3"], ["block_size=4"], ["block_size=2", "max_sequences=5"], ["cache_fraction=1e-3"]],
    ids=" ".join,
)
def test_these_change_no_token(options, overrides):
    expected, _ = responses_of(overrides)
    found, _ = responses_of(overrides, *(f"generation.{option}" for option in options))
    assert torch.equal(found, expected)


STOPS = {
    "texts": ([WORDS[word] for word in range(0, len(WORDS), 3)], set(range(3, 63, 3))),
    "special tokens": (["<s>", WORDS[0]], {0, 3}),
    "special tokens with a text": ([f"{word} <s>" for word in WORDS], {(token, 0) for token in range(3, 63)}),
    "parts of special tokens": (["s>", "</"], set()),
}


@pytest.mark.parametrize("name", STOPS)
def test_stop_texts_end_responses(name, overrides):
    """As an EOS does, in the last place, too: the response ends there, counts as ended, and its score is used."""
    words, stops = STOPS[name]  # as texts and as tokens
    (free_BG, before), num_shorter = responses_of(overrides), 0
    stopped_BG, after = responses_of(overrides, "generation.stop=" + ",".join(words))
    for free, stopped in zip(free_BG.tolist(), stopped_BG.tolist(), strict=True):
        found = [place for place in range(len(free)) if {free[place], tuple(free[place - 1 : place + 1])} & stops]
        end = found[0] + 1 if found else len(free)
        assert stopped == free[:end] + [-1] * (len(free) - end)
        num_shorter += bool(found) and free[-1] >= 0 and free[-1] not in EOS_IDS
    assert num_shorter > 1 or not stops
    gained = (after["ended_fraction"] - before["ended_fraction"]) * len(free_BG)
    assert gained == pytest.approx(num_shorter)


def test_the_cache_of_samples_has_the_same_limit(overrides, monkeypatch):
    job = RunOf(load(overrides)).job
    monkeypatch.setattr("rlhf_spmd.runtime.generation.kv_cache.free_bytes", lambda *_: 1000.0)
    with pytest.raises(UserError, match="KV cache of one sequence .* generation.cache_fraction"):
        sample_responses(job)


@pytest.mark.parametrize("fraction", [0.9, 1.0])
@pytest.mark.parametrize(("algorithm", "stream", "num"), [("remax", True, 2), ("remax", False, 1), ("grpo", True, 1)])
def test_engines_that_live_at_the_same_time_get_equal_caches(algorithm, stream, num, fraction):
    """The second one is made while the first has its cache."""
    workload = make_workload(presets.load("tiny", algorithm=algorithm))
    program = load_strategy("separation").compile(workload, Cluster.parse("1x4"), {"stream": stream})
    free, taken = 60e9, []
    for call in workload.workflow.generate_calls:
        taken = taken if num > 1 else []  # the first one is over
        rank = program.placement.layouts[call.name].ranks[-1]
        share = cache_share(program, rank, call.name, len(taken), fraction)
        taken.append(share * (free - sum(taken)))
    assert taken == pytest.approx([fraction * free / num] * num)


def test_a_model_that_nothing_can_end_is_refused(tmp_path):
    """Every response would run to the limit and get the penalty, which no reward could teach it to avoid."""
    endless = write_all(tmp_path, eos_token_ids=())
    RunOf(load(endless))  # by the tokenizer's
    for path in (tmp_path / "actor").glob("*token*_*.json"):
        path.write_text(
            json.dumps({k: v for k, v in json.loads(path.read_text(encoding="utf-8")).items() if k != "eos_token"}),
            encoding="utf-8",
        )
    with pytest.raises(UserError, match=r"names an end of sequence .*give generation.stop=TEXT"):
        RunOf(load(endless))
    for option in ("ppo.truncation=score", f"generation.stop={WORDS[0]}"):
        RunOf(load(endless, option))
