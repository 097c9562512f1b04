"""Whole iterations on given responses, in float64, against tests/slow_supervised.py: losses, what is logged, and the
gradient of every mini-batch."""

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_spmd.algorithms.training_order import epoch_order
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import Config
from rlhf_spmd.model.hf import load_model
from tests import slow_supervised as slow
from tests.folders import given_rows, write_model
from tests.runs import RunOf
from tests.trainee import noted_gradients

CASES = {
    "sft": ("sft", []),
    "sft, packed": ("sft", ["micro_batch=100"]),
    "reward model": ("reward_model", []),
    "reward model, centred": ("reward_model", ["reward_model.centering_coef=0.1"]),
    "reward model with foresight": ("reward_model", ["reward_model.foresight_coef=0.3"]),
    "dpo": ("dpo", []),
    "cdpo": ("dpo", ["dpo.label_smoothing=0.2", "dpo.beta=0.5"]),
    "ipo": ("dpo", ["dpo.loss=ipo", "dpo.beta=0.3"]),
    "ipo per token": ("dpo", ["dpo.loss=ipo", "dpo.per_token=true"]),
    "hinge": ("dpo", ["dpo.loss=hinge", "dpo.beta=2"]),
    "robust": ("dpo", ["dpo.loss=robust", "dpo.label_smoothing=0.2", "dpo.beta=0.5"]),
    "apo zero": ("dpo", ["dpo.loss=apo_zero", "dpo.beta=0.5", "dpo.nll_coef=0.3"]),
    "apo down": ("dpo", ["dpo.loss=apo_down", "dpo.beta=0.5"]),
    "simpo": ("dpo", ["dpo.loss=simpo", "dpo.beta=2", "dpo.target_margin=1"]),
    "orpo": ("dpo", ["dpo.loss=orpo", "dpo.nll_coef=1"]),
    "dpo per token": ("dpo", ["dpo.per_token=true", "dpo.beta=2"]),
}
ROWS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("supervised")
    rows = [row | {"margin": 0.25 * (index % 3)} for index, row in enumerate(given_rows(ROWS))]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, head, seed in (("actor", "lm", 1), ("reference", "lm", 3), ("reward", "scalar", 2)):
        write_model(folder / name, head=head, seed=seed)
    return folder


def config_of(name: str, folder: Path) -> Config:
    page, more = CASES[name]
    main = "reward" if page == "reward_model" else "actor"
    words = [f"data.prompts={folder / 'rows.jsonl'}", "data.max_prompt=8", "generation.max_new_tokens=10"]
    words += ["rollout_batch=12", "mini_batch=4", "micro_batch=3", f"optimizer.{main}_lr=1e-2", f"{page}.epochs=2"]
    alone = any(word in more for word in ("dpo.loss=simpo", "dpo.loss=orpo"))
    words += [f"models.reference={folder / 'reference'}"] if page == "dpo" and not alone else []
    return presets.load(None, [*words, *more], str(folder / main), algorithm=page)


def model_of(folder: str, head: str) -> tuple[torch.nn.Module, slow.Model]:
    model = load_model(folder, head=head, dtype=torch.float64)
    last = model.logits if head == "lm" else model.scalar
    return model, lambda tokens: last(model(torch.tensor([tokens]))[0])


def rows_of(run: RunOf) -> list[slow.Row]:
    """Returns the rows of the data set, of which every other token of a response is learned where there are marks."""
    prompts, marked = run.job.prompts, run.config.algorithm.assistant_tokens
    found = []
    for index in range(len(prompts)):
        responses = [prompts.responses[key][index] for key in run.config.algorithm.responses]
        margin = prompts.numbers["margins"][index][0] if "margins" in prompts.numbers else 0.0
        marks = [int(mark) for mark in prompts.numbers[marked][index]] if marked else []
        found.append(slow.Row(prompts.prompts[index], responses, marks, margin))
    return found


@pytest.mark.parametrize("name", CASES)
def test_losses_metrics_and_gradients(name, folder, float64, monkeypatch):
    run = RunOf(dataclasses.replace(config_of(name, folder), dtype="float64"))
    config, page = run.config, run.config.algorithm.name
    if page == "sft":
        marks = run.job.prompts.numbers["trained"]
        marks.items = marks.items.copy()
        marks.items[1::2] = 0
        for end in marks.ends:
            marks.items[end - 1] = 1
    model, said = model_of(config.main_folder, "scalar" if page == "reward_model" else "lm")
    loss_of = {
        "sft": functools.partial(slow.likelihood, said),
        "reward_model": functools.partial(slow.bradley_terry, said),
        "dpo": functools.partial(slow.preference, said, model_of(config.files("reference").folder, "lm")[1])
        if page == "dpo"
        else None,
    }[page]
    options = {
        key: value for key, value in dataclasses.asdict(config.options).items() if key not in ("epochs", "log_entropy")
    }
    grads = noted_gradients(monkeypatch)
    metrics = run.iteration()
    assert len(grads) == 6 and grads[0].dtype == torch.float64
    rows, picked = rows_of(run), run.job.prompts.batch(0, config.rollout_batch)
    logged: list[dict] = []
    optimizer = Adam(model, config)
    for epoch in range(2):
        for mini_batch in epoch_order(config.seed, 0, epoch, ROWS, config.mini_batch).tolist():
            loss, log = loss_of([rows[picked[row]] for row in mini_batch], **options)
            found = torch.autograd.grad(loss, list(model.parameters()))
            expected = torch.cat([grad.flatten() for grad in found])
            torch.testing.assert_close(grads[len(logged)], expected, rtol=1e-10, atol=1e-10)
            logged.append(log | {"loss": loss.item()})
            optimizer.step(found)
    over = {"score_min": min, "score_max": max}
    sizes = [
        sum(sum(rows[picked[row]].marks) for row in mini_batch)
        for epoch in range(2)
        for mini_batch in epoch_order(config.seed, 0, epoch, ROWS, config.mini_batch).tolist()
    ]
    for key in logged[0]:
        values = [log[key] for log in logged]
        by_tokens = page == "sft" and key != "trained_tokens"
        mean = float(np.average(values, weights=sizes if by_tokens else None))
        expected = over[key](values) if key in over else mean
        assert metrics[key] == pytest.approx(expected, rel=1e-8, abs=1e-10), key


class Adam:
    """torch's AdamW after the clip of a run."""

    def __init__(self, model: torch.nn.Module, config: Config):
        o = config.optimizer
        self.parameters, self.clip = list(model.parameters()), o.max_grad_norm
        lr = o.lr[config.main_role]
        self.adam = torch.optim.AdamW(
            self.parameters, lr=lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay
        )

    def step(self, grads: tuple[Tensor, ...]) -> None:
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = grad
        torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.adam.step()
