"""Our half of the equality: an iteration of the real runtime on one rank.

Where it generates its responses, its old logprobs are perturbed, and prompts, responses, rewards and old logprobs are
what TRL is then given.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from bench.against_trl.cases import Case
from bench.against_trl.widened import widened
from rlhf_spmd.config import presets
from rlhf_spmd.plan.runtime_words import PROMPTS
from rlhf_spmd.runtime.engines.flat_engine import FlatEngine
from rlhf_spmd.runtime.execute import parity_gate
from rlhf_spmd.runtime.execute.handlers import generate
from rlhf_spmd.runtime.execute.iteration import ALL
from rlhf_spmd.runtime.weights import rank_models
from tests.runs import RunOf, compiled
from tests.trainee import whole_gradients, whole_weights

NO_CLIPPING = 1e30  # of the gradient's norm


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """A step: its loss, gradients and weights after it by name, metrics of the iteration, and its rows."""

    loss: float
    gradients: dict[str, Tensor]
    after: dict[str, Tensor]
    metrics: dict[str, Any]
    rows: list


class SGD:
    """Stands in for AdamW in an engine."""

    def __init__(self, states: list[dict[str, Tensor]]):
        self._states = states

    def step(self, gradients: Sequence[Tensor], *, lr: float) -> None:
        for state, gradient in zip(self._states, gradients, strict=True):
            state["master"].sub_(gradient, alpha=lr)


def one_step(case: Case, words: list[str], *, seed: int = 3, wide: bool = False) -> Taken:
    """Runs an iteration with one step of SGD at learning rate 1 in float64, on the responses that it generates or that
    the data set has.

    words: options of models, data, reward and sizes, with one mini-batch in the iteration.
    seed: of generated responses.
    wide: without casts (widened.py).
    """
    words = [*words, "iterations=1", f"optimizer.{case.role}_lr=1", f"optimizer.max_grad_norm={NO_CLIPPING}"]
    words += [*case.options, *([] if case.rows else ["parity_tolerance=100", f"seed={seed}"])]
    config = presets.load("tiny", words, algorithm=case.page)
    gradients: dict[str, Tensor] = {}
    with in_float64(), noted_gradients(gradients), perturbed(case.noise, seed):
        config = dataclasses.replace(config, dtype="float64")
        run = RunOf(config, program=compiled(config))
        engine = run.job.models.engines[case.role]
        engine._adamw = SGD(engine._adamw.states)
        with widened() if wide else nullcontext():
            metrics = run.iteration()
    loss, rows = ("loss", given_rows(run)) if case.rows else ("policy_loss", generated_rows(run))
    return Taken(metrics[loss], gradients, whole_weights(engine), metrics, rows)


@contextmanager
def in_float64() -> Iterator[None]:
    """Lets a run compute in float64, which no user can ask for."""
    with (
        patch.dict(rank_models.DTYPES, {"float64": torch.float64}),
        patch.dict(parity_gate.PARITY_TOLERANCE, {"float64": 1e-4}),
    ):
        yield


@contextmanager
def noted_gradients(found: dict[str, Tensor]) -> Iterator[None]:
    """Keeps the summed gradient of the (only) engine's first step, by weight."""
    real = FlatEngine._norm

    def noted(engine: FlatEngine) -> float:
        assert not found, "the iteration has one step"
        found.update(whole_gradients(engine))
        return real(engine)

    with patch.object(FlatEngine, "_norm", noted):
        yield


@contextmanager
def perturbed(noise: float, seed: int) -> Iterator[None]:
    """Adds noise to the generator's logprobs, which are the old logprobs of the loss."""
    real: Callable = generate.generate

    def noisy(job, call, run, data) -> None:
        real(job, call, run, data)
        kept = data.store.at("logprobs", job.place(run))
        normal = torch.randn(kept.shape, generator=torch.Generator().manual_seed(seed))
        is_token = data.store.at("responses", job.place(run)) >= 0
        kept += torch.where(is_token, noise * normal, 0.0)

    with patch.object(generate, "generate", noisy):
        yield


def generated_rows(run: RunOf) -> list[dict]:
    """Returns what an iteration generated and scored, one row for each response."""
    store, everywhere = run.data.store, (ALL, slice(0, run.program.workload.mini_batch))
    columns = {
        key: store.at(key, everywhere).flatten(0, 1).tolist() for key in ("prompts", "responses", "logprobs", "scores")
    }
    places = zip(run.data.prompt_MC.flatten().tolist(), run.data.sample_MC.flatten().tolist(), strict=True)
    rows = []
    for number, (prompt, sample) in enumerate(places):
        response = [token for token in columns["responses"][number] if token >= 0]
        rows.append(
            {
                "prompt_index": prompt,
                "sample": sample,
                "prompt": [token for token in columns["prompts"][number] if token >= 0],
                "response": response,
                "old": columns["logprobs"][number][: len(response)],
                "reward": columns["scores"][number],
            }
        )
    return rows


def given_rows(run: RunOf) -> list[list[tuple[list[int], list[int]]]]:
    """Returns the sequences of each row of an iteration: one, or that of the chosen and that of the rejected response,
    each as tokens and as 1 for each that is learned."""
    algorithm, everywhere = run.config.algorithm, (ALL, slice(0, run.program.workload.mini_batch))
    keys = (PROMPTS, *algorithm.responses, *filter(None, [algorithm.assistant_tokens]))
    columns = {key: run.data.store.at(key, everywhere).flatten(0, 1).tolist() for key in keys}
    rows = []
    for number, padded in enumerate(columns[PROMPTS]):
        prompt, row = [token for token in padded if token >= 0], []
        for key in algorithm.responses:
            response = [token for token in columns[key][number] if token >= 0]
            marks = [1] * len(response)
            if algorithm.assistant_tokens:
                marks = [int(mark) for mark in columns[algorithm.assistant_tokens][number][: len(response)]]
            row.append((prompt + response, [0] * len(prompt) + marks))
        rows.append(row)
    return rows


def write_reward(path: Path) -> str:
    """Writes a reward function that tells all responses apart. Returns the option that names it."""
    path.write_text(
        "def letters(prompts, responses):\n"
        "    return [sum(map(ord, response)) % 97 / 50 - 1 for response in responses]\n",
        encoding="utf-8",
    )
    return f"reward_function={path}:letters"
