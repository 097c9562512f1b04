"""Tokens that the first role's tokenizer lacks: never drawn, and without probability in every pass."""

import json
from pathlib import Path

import pytest
import torch

from rlhf_spmd.errors import UserError
from rlhf_spmd.kernels.known_tokens import KnownTokens
from rlhf_spmd.model.hf import load_model, load_tokenizer, read_config
from rlhf_spmd.model.sequences import Sequences, forward, response_logprobs
from rlhf_spmd.runtime.records.run_folder import RunFolder
from rlhf_spmd.runtime.run.recorded import save_models
from tests.folders import write_all, write_model
from tests.runs import RunOf, load
from tests.unit.runtime.generation.test_rollout import VOCAB, draw, make_model, make_prompts, pad, run

RULES = {
    "open": {"temperature": 1.3},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 7, "temperature": 1.5},
    "nucleus": {"top_p": 0.9, "min_p": 0.01},
    "early end": {"eos_ids": (1, 2), "min_new_tokens": 3},
}
HOLES = (3, 9, 40)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_holes_are_not_drawn_and_have_no_mass(rules):
    model, known = make_model(), KnownTokens(VOCAB - 5, HOLES)
    prompts, bits_BG = make_prompts(12), draw(12)
    responses_BG, logprobs_BG, support_BGK = run(model, prompts, bits_BG, known=known, **rules)
    assert int(responses_BG.max()) < known.stop and not torch.isin(responses_BG, torch.tensor(HOLES)).any()
    batch = Sequences.join(pad(prompts), responses_BG)
    again = {"temperature": rules.get("temperature") or 1.0, "eos_ids": (), "min_new_tokens": 0} | rules
    again = {name: value for name, value in again.items() if name in ("temperature", "eos_ids", "min_new_tokens")}
    if rules.get("temperature") != 0.0 and "top_p" not in rules:
        forced_BG = response_logprobs(model, batch, forward(model, batch), support_BGK, known=known, **again)
        torch.testing.assert_close(forced_BG, logprobs_BG, rtol=0, atol=3e-5)


# ---- runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Returns an actor of 128 rows, a reward model of 63, and a tokenizer whose ids end at 62, without 10 and 20."""
    folder = tmp_path_factory.mktemp("padded")
    write_all(folder, vocab_size=128)
    for name in ("actor", "reward"):
        path = folder / name / "tokenizer.json"
        values = json.loads(path.read_text(encoding="utf-8"))
        words = values["model"]["vocab"]
        values["model"]["vocab"] = {word: token for word, token in words.items() if token not in (10, 20)}
        path.write_text(json.dumps(values), encoding="utf-8")
    return folder


def config_of(folder: Path, *more: str):
    options = [f"models.actor={folder / 'actor'}", f"models.reward={folder / 'reward'}", "data.max_prompt=8"]
    options += [f"data.prompts={folder / 'prompts.jsonl'}", "generation.max_new_tokens=10", "iterations=1"]
    return load(options, "rollout_batch=8", "mini_batch=4", "micro_batch=4", *more)


def test_a_run_draws_no_token_that_the_tokenizer_lacks(folder, tmp_path):
    """Also where the reward model knows fewer tokens than the actor has rows."""
    made = RunOf(config_of(folder, "generation.temperature=3"))
    made.iteration()
    drawn = {token for row in made.responses[0].values() for token in row}
    assert drawn and drawn <= set(load_tokenizer(folder / "actor").vocabulary().values())
    assert made.job.known.missing(128)[:3] == [10, 20, 63] and made.job.known.count == 61
    save_models(made.job, RunFolder(tmp_path))
    saved = json.loads((tmp_path / "actor/generation_config.json").read_text(encoding="utf-8"))
    assert saved["suppress_tokens"] == [10, 20, *range(63, 128)]
    assert read_config(tmp_path / "actor").eos_token_ids == (1,)
    load_model(tmp_path / "actor", head="lm")


def test_an_end_that_the_tokenizer_lacks_is_refused(tmp_path):
    write_model(tmp_path, vocab_size=128, eos_token_ids=(1, 100))
    with pytest.raises(UserError, match=r"the end of sequence 100 .* not a token of its tokenizer"):
        load_tokenizer(tmp_path).eos_ids(read_config(tmp_path))
