"""Logprobs of the reference from a file: the numbers of the loop, with which the reference is not loaded."""

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from rlhf_spmd.config import presets
from rlhf_spmd.config.options import Config, make_workload
from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.cost.memory import static_bytes
from rlhf_spmd.plan.program.evaluation import precompute_program
from rlhf_spmd.plan.proof.check import check
from rlhf_spmd.runtime.data.precomputed import try_to_write
from rlhf_spmd.runtime.offline.precompute import precompute
from rlhf_spmd.runtime.run import prepare
from rlhf_spmd.verbs.precompute import check_out
from tests.folders import WORDS, write_model
from tests.runs import OneRank, RunOf, compiled

KEYS = ("ref_chosen_logprobs", "ref_rejected_logprobs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder, rows = tmp_path_factory.mktemp("precompute"), []
    for index in range(19):
        words = [WORDS[(7 * index + 3 * place) % 60] for place in range(14)]
        row = {"prompt": words[: 1 + index % 5], "chosen": words[2 : 4 + index % 4]}
        rows.append({name: " ".join(some) for name, some in (row | {"rejected": words[5 : 7 + index % 5]}).items()})
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


def write(config: Config, path: Path) -> Path:
    program = precompute_program(compiled(config), num_rows=config.rollout_batch)
    assert [finding for finding in check(program) if finding.severity == "error"] == []
    assert program.workload.workflow.models == ("reference",)
    precompute(config, program, OneRank(), path)
    return path


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("options", [(), ("dpo.loss=ipo", "dpo.per_token=true"), ("dpo.label_smoothing=0.1",)])
def test_the_loss_and_the_weights_of_the_loop(options, folder, tmp_path):
    runs, file = [], write(config_of(folder, dtype="float64"), tmp_path / "ref.safetensors")
    for words in ((), (f"data.precomputed_logprobs={file}",)):
        run = RunOf(config_of(folder, *options, *words, dtype="float64"))
        runs.append((run.iterations(), run.weights("actor")))
    (expected, weights), (found, own) = runs
    for mine, theirs in zip(found, expected, strict=True):
        for name in ("loss", "actor_grad_norm", "margin", "accuracy", "chosen_reward"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-10, abs=1e-10), name
    for name, weight in own.items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-10, atol=1e-10)
    assert found[0]["margin"] != 0  # the reference is another model


def test_the_file_has_a_number_for_every_token_of_the_set(folder, tmp_path):
    values = load_file(write(config_of(folder), tmp_path / "ref.safetensors"))
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


def test_without_the_reference_less_memory_is_needed(folder):
    with_it = make_workload(config_of(folder))
    without = make_workload(config_of(folder, "data.precomputed_logprobs=ref.safetensors"))
    assert set(with_it.models) - set(without.models) == {"reference"}
    assert [call.name for call in without.workflow.calls] == ["actor_train"]
    of_loop, of_file = (
        compiled(config_of(folder, *words)) for words in ((), ("data.precomputed_logprobs=ref.safetensors",))
    )
    num_bytes = 4 * with_it.models["reference"].num_params
    assert sum(static_bytes(of_loop, 0).values()) - sum(static_bytes(of_file, 0).values()) == num_bytes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.prompts=FOLDER/others.jsonl"], "computed for other rows than those of .*others.jsonl"),
        (["data.max_prompt=2", "data.long_prompts=truncate"], "or they were cut at other limits: compute it again"),
        (["models.reference=FOLDER/actor"], "computed with another reference than .*actor"),
        (["dtype=bfloat16"], "computed with dtype=float32, and this run has bfloat16"),
        (["generation.temperature=0.5"], "computed with generation.temperature=1, and this run has 0.5"),
        (
            ["data.precomputed_logprobs=none"],
            r"none does not exist \(looked in .*\): write it with `precompute --out none`",
        ),
        (["data.precomputed_logprobs=FOLDER/rows.jsonl"], "rows.jsonl holds no precomputed logprobs"),
        (["data.precomputed_logprobs=FOLDER/actor/model.safetensors"], "holds no precomputed logprobs: compute it"),
    ],
)
def test_numbers_of_something_else_are_refused(words, message, folder, tmp_path):
    file = write(config_of(folder), tmp_path / "ref.safetensors")
    words = [f"data.precomputed_logprobs={file}", *(word.replace("FOLDER", str(folder)) for word in words)]
    with pytest.raises(UserError, match=message):
        RunOf(config_of(folder, *words))


def test_the_file_brings_the_time_that_the_chat_template_wrote(folder, tmp_path, monkeypatch):
    row = {"prompt": [{"role": "user", "content": "bi"}]}
    row |= {name: [{"role": "assistant", "content": word}] for name, word in (("chosen", "ba"), ("rejected", "be"))}
    (tmp_path / "rows.jsonl").write_text(8 * (json.dumps(row) + "\n"), encoding="utf-8")
    (tmp_path / "t.jinja").write_text(
        "{{ 'bo ' * (strftime_now('%d') | int) }}{% for m in messages %}{{ m.content }} {% endfor %}", encoding="utf-8"
    )
    words = [f"data.prompts={tmp_path / 'rows.jsonl'}", f"data.chat_template={tmp_path / 't.jinja'}"]
    at_day = "2026-02-0{}T12:00:00+00:00".format
    monkeypatch.setattr(prepare, "time_of_start", lambda: at_day(2))
    file = write(config_of(folder, *words), tmp_path / "ref.safetensors")
    monkeypatch.setattr(prepare, "time_of_start", lambda: at_day(3))
    assert len(RunOf(config_of(folder, *words)).job.prompts.prompts[0]) == 4
    words.append(f"data.precomputed_logprobs={file}")
    run = RunOf(config_of(folder, *words))
    assert len(run.job.prompts.prompts[0]) == 3 and run.job.config.started == at_day(2)


def test_numbers_that_cannot_be_are_refused(folder, tmp_path):
    file = write(config_of(folder), tmp_path / "ref.safetensors")
    values = load_file(file)
    with safe_open(file, "np") as opened:
        facts = opened.metadata()
    for wrong in (values[KEYS[1]][1:], np.full_like(values[KEYS[1]], np.nan)):
        save_file(values | {KEYS[1]: wrong}, file, metadata=facts)
        with pytest.raises(UserError, match=f"{KEYS[1]} is not one finite number for each token: compute it again"):
            RunOf(config_of(folder, f"data.precomputed_logprobs={file}"))


def test_an_evaluation_needs_a_file_of_its_own(folder):
    held_out = f"eval.prompts={folder / 'others.jsonl'}"
    with pytest.raises(UserError, match=r"which eval.prompts would need, too: give eval.precomputed_logprobs=FILE"):
        config_of(folder, held_out, "data.precomputed_logprobs=a")
    with pytest.raises(UserError, match=r"which data.prompts would need, too: give data.precomputed_logprobs=FILE"):
        config_of(folder, held_out, "eval.precomputed_logprobs=a")


def test_an_algorithm_without_a_frozen_model_is_refused(folder):
    config = presets.load("tiny", ["data.precomputed_logprobs=a", "eval.prompts="], algorithm="sft")
    with pytest.raises(UserError, match="this algorithm has no such model; drop the option"):
        make_workload(config)
    with pytest.raises(UserError, match="this algorithm has no such model"):
        precompute_program(compiled(presets.load("tiny")), num_rows=8)  # PPO's reference reads generated responses
    with pytest.raises(UserError, match="this algorithm has no such model"):
        make_workload(presets.load("tiny", ["data.precomputed_logprobs=a"], algorithm="sft"))  # which evaluates


def test_a_file_that_cannot_be_written_is_known_before_the_passes(folder, tmp_path):
    with pytest.raises(UserError, match=r"x.st can't be written: .*; name another file"):
        try_to_write(folder / "rows.jsonl" / "x.st")
    draft = try_to_write(tmp_path / "new" / "x.st")
    assert draft.stat().st_size == 0 and draft.parent == tmp_path / "new"
    written = write(config_of(folder), tmp_path / "ref.safetensors")
    assert written.stat().st_mode == draft.stat().st_mode, "readable by whom the umask allows"


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("", "--out '' is not the name of a file"),
        ("FOLDER", "is not the name of a file; name one"),
        ("FOLDER/rows.jsonl", "is the file of the rows, which would be lost; name another file"),
        ("FOLDER/others.jsonl", "exists already; pass --overwrite"),
    ],
)
def test_a_file_that_would_be_lost_is_refused(out, message, folder):
    parsed = argparse.Namespace(out=out.replace("FOLDER", str(folder)), overwrite="rows" in out)
    with pytest.raises(UserError, match=message):
        check_out(parsed, config_of(folder))
