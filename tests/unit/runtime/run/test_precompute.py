"""Logprobs of the reference in the folder of a run: the numbers of the loop, with which the reference is not loaded."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from rlhf_spmd.config import presets
from rlhf_spmd.config.options import Config
from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.program.evaluation import precompute_program
from rlhf_spmd.runtime.data.precomputed import has_all_parts
from rlhf_spmd.runtime.run.precompute import precompute
from rlhf_spmd.runtime.run.prepare import prepare
from tests.folders import given_rows, write_model
from tests.programs import errors
from tests.runs import OneRank, RunOf, compiled

KEYS = ("ref_chosen_logprobs", "ref_rejected_logprobs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder, rows = tmp_path_factory.mktemp("precompute"), given_rows(19)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "others.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows[1:] + rows[:1]), encoding="utf-8"
    )
    write_model(folder / "actor", seed=1)
    write_model(folder / "reference", seed=3)
    return folder


def config_of(folder: Path, *words: str, dtype: str = "") -> Config:
    sizes = ("data.max_prompt=8", "generation.max_new_tokens=10", "rollout_batch=8", "mini_batch=4", "micro_batch=3")
    words = (f"data.prompts={folder / 'rows.jsonl'}", f"models.reference={folder / 'reference'}", *sizes, *words)
    config = presets.load(
        None, ["iterations=2", "optimizer.actor_lr=1e-3", *words], str(folder / "actor"), algorithm="dpo"
    )
    return dataclasses.replace(config, dtype=dtype) if dtype else config


def write(config: Config, run: Path) -> Path:
    """Computes the logprobs into the folder of a run -> their files."""
    program = precompute_program(compiled(config), num_rows=config.rollout_batch)
    assert errors(program) == []
    assert program.workload.workflow.models == ("reference",)
    precompute(prepare(config, program, OneRank()).job, str(run))
    (parts,) = (run / "logprobs").iterdir()
    return parts


def whole(parts: Path) -> dict[str, np.ndarray]:
    files = [load_file(path) for path in sorted(parts.iterdir())]
    return {key: np.concatenate([file[key] for file in files]) for key in KEYS}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("options", [(), ("dpo.loss=ipo", "dpo.per_token=true"), ("dpo.label_smoothing=0.1",)])
def test_the_loss_and_the_weights_of_the_loop(options, folder, tmp_path):
    runs = []
    write(config_of(folder, dtype="float64"), tmp_path)
    for words in ((), (f"data.precomputed_logprobs={tmp_path}",)):
        run = RunOf(config_of(folder, *options, *words, dtype="float64"))
        runs.append((run.iterations(), run.weights("actor")))
    (expected, weights), (found, own) = runs
    for mine, theirs in zip(found, expected, strict=True):
        for name in ("loss", "actor_grad_norm", "margin", "accuracy", "chosen_reward"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-10, abs=1e-10), name
    for name, weight in own.items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-10, atol=1e-10)
    assert found[0]["margin"] != 0  # the reference is another model


def test_there_is_a_number_for_every_token_of_the_set(folder, tmp_path):
    parts = write(config_of(folder), tmp_path)
    values = whole(parts)
    run = RunOf(config_of(folder))
    run.iteration()
    responses = run.job.prompts.responses
    for key, name in zip(KEYS, ("chosen", "rejected"), strict=True):
        assert values[key].shape == (sum(map(len, responses[name])),) and (values[key] < 0).all()
        starts = np.concatenate(([0], responses[name].ends))
        for place, index in np.ndenumerate(run.data.prompt_MC):
            row = values[key][starts[index] : starts[index + 1]]
            in_loop = run.data.store[key][place][: len(row)].numpy()
            np.testing.assert_allclose(row, in_loop, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "words",
    [
        ["data.prompts=FOLDER/others.jsonl"],
        ["data.max_prompt=2", "data.long_prompts=truncate"],
        ["models.reference=FOLDER/actor"],
        ["dtype=bfloat16"],
        ["data.precomputed_logprobs=none"],
    ],
)
def test_numbers_of_something_else_are_refused(words, folder, tmp_path):
    write(config_of(folder), tmp_path)
    words = [f"data.precomputed_logprobs={tmp_path}", *(word.replace("FOLDER", str(folder)) for word in words)]
    with pytest.raises(UserError, match=r"has no logprobs of all rows of .*jsonl by this reference.*precompute=true"):
        RunOf(config_of(folder, *words))


def test_files_that_are_missing_or_broken_are_named(folder, tmp_path):
    parts = write(config_of(folder), tmp_path)
    words = f"data.precomputed_logprobs={tmp_path}"
    last = sorted(parts.iterdir())[-1]
    last.write_text("no numbers", encoding="utf-8")
    with pytest.raises(UserError, match=f"{last} can't be read .*: remove it, and resume {tmp_path}"):
        RunOf(config_of(folder, words))
    assert has_all_parts(str(tmp_path), 1) and not has_all_parts(str(tmp_path), 2)
    last.unlink()
    assert not has_all_parts(str(tmp_path), 1)
    with pytest.raises(UserError, match="has no logprobs of all rows"):
        RunOf(config_of(folder, words))
