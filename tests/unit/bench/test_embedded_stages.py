"""The embedded base model, answers and pairs, the scripts that make them, and the demo that runs all stages on them."""

import pytest

from rlhf_spmd import embedded
from rlhf_spmd.config import presets

STAGES = {"sft": ("base", "answers"), "reward_model": ("actor", "pairs"), "dpo": ("actor", "pairs")}


# ---- the files ------------------------------------------------------------------------------------------------------


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
