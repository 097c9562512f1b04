"""The embedded base model, answers and pairs, the scripts that make them, and the demo that runs all stages on them."""

import pytest

from rlhf_spmd import embedded
from rlhf_spmd.config import presets
from rlhf_spmd.model.hf import load_model, load_tokenizer
from tools.embedded import grammar
from tools.embedded.responses import continuations
from tools.embedded.stages import read_rows

FILES = ("prompts", "held_out", "answers", "answers_held_out", "pairs", "pairs_held_out")
STAGES = {"sft": ("base", "answers"), "reward_model": ("actor", "pairs"), "dpo": ("actor", "pairs")}


def rows(name: str) -> list[dict]:
    return read_rows(embedded.path_of(f"{name}.jsonl"))


# ---- the files ------------------------------------------------------------------------------------------------------


def test_held_out_rows_have_prompts_of_their_own():
    prompts = {name: [row["prompt"] for row in rows(name)] for name in FILES}
    assert len(prompts["answers"]) == 1024 and len(prompts["pairs"]) > 1000 and len(prompts["held_out"]) == 128
    for name in ("answers", "pairs"):
        assert not set(prompts[name]) & set(prompts[f"{name}_held_out"])
    assert set(prompts["pairs"]) <= set(prompts["prompts"]) and set(prompts["pairs_held_out"]) <= set(
        prompts["held_out"]
    )
    assert not set(prompts["prompts"]) & set(prompts["held_out"])


def test_answers_are_the_grammars_and_pairs_are_ranked():
    assert all(grammar.is_whole(row["completion"]) for row in rows("answers") + rows("answers_held_out"))
    better = [grammar.score(row["chosen"]) - grammar.score(row["rejected"]) for row in rows("pairs")]
    assert sum(one > 0 for one in better) / len(better) > 0.8


def test_the_base_model_writes_poorly_and_the_actor_well():
    tokenizer, prompts = load_tokenizer(embedded.path_of("actor")), [row["prompt"] for row in rows("held_out")[:8]]
    assert (embedded.path_of("base") / "tokenizer.json").read_bytes() == (
        embedded.path_of("actor") / "tokenizer.json"
    ).read_bytes()
    whole = {}
    for name in ("base", "actor"):
        made = continuations(load_model(embedded.path_of(name), head="lm"), tokenizer, prompts, 3, max_new_tokens=24)
        whole[name] = sum(grammar.is_whole(text) for text, _ in made) / len(made)
    assert whole["base"] < 0.2 and whole["actor"] > 0.9


@pytest.mark.parametrize("algorithm", STAGES)
def test_the_default_preset_has_rows_for_every_stage(algorithm):
    config, (model, name) = presets.load(None, algorithm=algorithm), STAGES[algorithm]
    assert config.preset == "tiny" and config.main_folder == str(embedded.path_of(model))
    assert (config.data.prompts, config.eval.prompts) == tuple(
        str(embedded.path_of(f"{name}{end}.jsonl")) for end in ("", "_held_out")
    )


def test_rows_of_ones_own_are_not_compared_with_those_of_the_preset():
    mine = presets.load(None, ["data.prompts=mine.jsonl"], algorithm="sft")
    assert mine.eval.prompts == "" and mine.eval.every == presets.load(None).eval.every
    both = presets.load(None, ["data.prompts=mine.jsonl", "eval.prompts=other.jsonl"], algorithm="sft")
    assert both.eval.prompts == "other.jsonl"
