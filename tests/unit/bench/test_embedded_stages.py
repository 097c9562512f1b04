"""The embedded base model, answers and pairs, the scripts that make them, and the demo that runs all stages on them."""

import json
import random
import shlex
from pathlib import Path

import pytest

from rlhf_spmd import embedded
from rlhf_spmd.command_line.arguments import parse
from rlhf_spmd.config import presets
from rlhf_spmd.model.hf import load_model, load_tokenizer
from rlhf_spmd.runtime.offline.options import load_options
from tools.embedded import demo_pipeline, grammar, pairs, rank_pairs
from tools.embedded.responses import continuations
from tools.embedded.stages import REPOSITORY, read_rows, sizes, write_rows

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


# ---- the scripts ----------------------------------------------------------------------------------------------------


def test_what_a_whole_text_is():
    rng = random.Random(0)
    assert all(grammar.is_whole(grammar.continuation(rng, grammar.opening(rng))) for _ in range(500))
    for text in ("", " The soup was.", "The soup was good.", " The soup was good. The", " soup The was good."):
        assert not grammar.is_whole(text), text
    damaged = [pairs.damaged(rng, grammar.continuation(rng, grammar.opening(rng))) for _ in range(300)]
    assert sum(map(grammar.is_whole, damaged)) / 300 < 0.3


def test_an_annotator_is_noisy_and_leaves_ties_out():
    rng, good, bad = random.Random(0), (" The soup was delicious.", 1.0), (" The soup was cold.", 0.5)
    ranked = [pairs.ranked(rng, "p", *two) for _ in range(1000) for two in ((good, bad), (bad, good))]
    right = sum(row == {"prompt": "p", "chosen": good[0], "rejected": bad[0]} for row in ranked) / 2000
    assert right == pytest.approx(1 / (1 + 2.718281828**-3), abs=0.015)
    assert pairs.ranked(rng, "p", good, (" The pie was superb.", 1.0)) is None
    assert pairs.quality(good[0], False) == pairs.quality(good[0], True) - pairs.CUT


def test_ranking_a_file_of_samples(tmp_path, capsys):
    texts = [" The soup was delicious.", " The soup was awful."]
    samples = [
        {"prompt": f"prompt {number}", "response": texts[sample % 2], "finish": "eos"}
        for number in range(16)
        for sample in range(4)
    ]
    out, held_out = tmp_path / "pairs.jsonl", tmp_path / "held_out.jsonl"
    words = ["--out", str(out), "--held-out", str(held_out)]
    assert rank_pairs.main([str(write_rows(tmp_path / "samples.jsonl", samples)), *words]) == 0
    assert json.loads(capsys.readouterr().out) == {"bench": "rank-pairs", "pairs": 28, "held_out": 4, "ok": True}
    assert {row["prompt"] for row in read_rows(held_out)} == {"prompt 7", "prompt 15"}
    assert all((row["chosen"], row["rejected"]) == tuple(texts) for row in read_rows(out))


@pytest.mark.parametrize(("steps", "iterations"), [(1500, 150), (7, 1), (22, 11), (3, 1)])
def test_a_run_makes_the_steps_it_is_asked_for(steps, iterations):
    words = dict(word.split("=") for word in sizes(steps, 64, 2))
    assert int(words["iterations"]) == iterations and words["micro_batch"] == "32"
    assert int(words["iterations"]) * int(words["rollout_batch"]) == steps * 64


def test_commands_of_the_demo_are_understood():
    found = demo_pipeline.commands(Path("runs/x"), 2, demo_pipeline.Sizes())
    assert list(found) == ["sft", "samples", "pairs", "reward model", "ppo", "dpo", "page"]
    for words in found.values():
        assert shlex.split(shlex.join(words)) == words
        if "rlhf_spmd" not in words:
            continue
        parsed = parse(words[words.index("rlhf_spmd") + 1 :])
        if parsed.verb == "train":
            models = [word for word in parsed.overrides if word.startswith("models.")]
            rest = [word for word in parsed.overrides if word not in models]  # folders that earlier stages write
            config = presets.load(None, rest, algorithm=parsed.algorithm)
            assert config.eval.prompts and {word.partition("=")[0] for word in models} <= {
                f"models.{role}" for role in config.algorithm.roles
            }
        elif parsed.verb == "generate":
            assert load_options(parsed.overrides).samples_per_prompt == 12


@pytest.mark.slow
def test_make_runs_from_end_to_end(tmp_path):
    """Twice: once whole, then with the actor kept; what is made from the same things has the same bytes."""
    from tools.embedded.make_embedded import Recipe, make

    recipe = Recipe(corpus=300, hidden_size=32, intermediate_size=48, actor_layers=2, reward_layers=1, sft_steps=3,
                    sft_batch=4, base_steps=2, reward_steps=2, reward_batch=4, num_prompts=64, num_answers=32,
                    num_held_out=8, num_pairs=32, pool=8, max_new_tokens=64)  # fmt: skip
    made = make(tmp_path, recipe, ranks=1)
    assert 6 < made["supervised_loss"] < 7.5 and made["reward_loss"] < 1 and set(made["base"]) < set(made)
    names = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert len(names) == 3 * 5 + len(FILES) + 1
    before = {name: (tmp_path / name).read_bytes() for name in names if name.name != "made.json"}  # it has seconds
    again = make(tmp_path, recipe, ranks=2, keep=True)
    assert again["supervised_loss"] == made["supervised_loss"] and again["base"]["supervised_loss"] > 6
    changed = {str(name) for name, text in before.items() if (tmp_path / name).read_bytes() != text}
    assert changed <= {"base/model.safetensors"}  # two ranks add in another order


@pytest.mark.slow
def test_the_demo_runs_from_end_to_end(tmp_path):
    short = ("iterations=1", "rollout_batch=32", "eval.num_prompts=16")
    runs = tmp_path / "runs"
    sizes = demo_pipeline.Sizes(sft=short, samples=("samples_per_prompt=2",), reward_model=short, ppo=short, dpo=short)
    found = demo_pipeline.demo(runs, 2, sizes)
    assert {row["stage"] for row in found} == {"SFT", "reward model", "PPO", "DPO"}
    page = (REPOSITORY / runs / "report.html").read_text(encoding="utf-8")
    assert all(f'id="run-{number}"' in page for number in range(4)) and "mean@1" in page
