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
