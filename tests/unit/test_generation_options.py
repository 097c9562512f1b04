"""The options of generation in whole iterations: which of them change tokens, and which only speed or memory."""

import json

import pytest
import torch

from rlhf_spmd.errors import UserError
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


def test_stop_texts_end_responses(overrides):
    """As an EOS does: the response ends there, counts as ended, and its score is used."""
    free_BG, before = responses_of(overrides)
    words = range(0, len(WORDS), 3)
    stopped_BG, after = responses_of(overrides, "generation.stop=" + ",".join(WORDS[word] for word in words))
    stops = {3 + word for word in words}  # as tokens
    num_shorter = 0
    for free, stopped in zip(free_BG.tolist(), stopped_BG.tolist(), strict=True):
        end = next((place + 1 for place, token in enumerate(free) if token in stops), len(free))
        assert stopped == free[:end] + [-1] * (len(free) - end)
        num_shorter += end < len(free) and free[-1] >= 0 and free[-1] not in EOS_IDS
    assert num_shorter > 2
    gained = (after["ended_fraction"] - before["ended_fraction"]) * len(free_BG)
    assert gained == pytest.approx(num_shorter)


def test_a_cache_that_holds_no_sequence_is_refused(overrides, monkeypatch):
    monkeypatch.setattr("rlhf_spmd.runtime.execute.handlers.generate.free_bytes", lambda *_: 1000.0)
    with pytest.raises(UserError, match="KV cache of one sequence .* generation.cache_fraction"):
        responses_of(overrides)


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
