"""Our half: an iteration of the real runtime on one rank, with one optimizer step.

For the equality: where it generates its responses, its old logprobs are perturbed, and prompts, responses, rewards and
old logprobs are what TRL is then given.

For whole steps, a worker: `python -m bench.against_trl.ours FOLDER MODEL WORK RANK`, in float32, which waits for a
command before each iteration. With GRPO a request's limit is the length that the command gives; no end token is drawn
before it. RANK: of adapters of all linear layers; 0: all weights train.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from bench.against_trl import work
from bench.against_trl.cases import Case
from bench.against_trl.widened import widened
from bench.against_trl.work import GRPO, KNOWN, Work
from bench.speed.generate_peers import use_fastest
from rlhf_spmd.config import presets
from rlhf_spmd.plan.runtime_words import PROMPTS
from rlhf_spmd.runtime.engines.flat_engine import FlatEngine
from rlhf_spmd.runtime.execute import parity_gate
from rlhf_spmd.runtime.execute.handlers import generate
from rlhf_spmd.runtime.execute.iteration import ALL
from rlhf_spmd.runtime.generation.engine import Engine
from rlhf_spmd.runtime.weights import rank_models
from rlhf_spmd.runtime.world.trace import Tracer
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
    with (
        patch.dict(rank_models.DTYPES, {"float64": torch.float64}),  # which no user can ask for
        patch.dict(parity_gate.PARITY_TOLERANCE, {"float64": 1e-4}),
        noted_gradients(gradients),
        perturbed(case.noise, seed),
    ):
        config = dataclasses.replace(config, dtype="float64")
        run = RunOf(config, program=compiled(config))
        engine = run.job.models.engines[case.role]
        engine._adamw = SGD(engine._adamw.states)
        with widened() if wide else nullcontext():
            metrics = run.iteration()
    loss, rows = ("loss", given_rows(run)) if case.rows else ("policy_loss", generated_rows(run))
    return Taken(metrics[loss], gradients, whole_weights(engine), metrics, rows)


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


def columns_of(run: RunOf, *keys: str) -> dict[str, list]:
    """Returns keys of the data of an iteration, with a value for each row."""
    everywhere = (ALL, slice(0, run.program.workload.mini_batch))
    return {key: run.data.store.at(key, everywhere).flatten(0, 1).tolist() for key in keys}


def unpadded(tokens: list[int]) -> list[int]:
    return [token for token in tokens if token >= 0]


def generated_rows(run: RunOf) -> list[dict]:
    """Returns what an iteration generated and scored, one row for each response."""
    columns = columns_of(run, "prompts", "responses", "logprobs", "scores")
    names = ("prompt_index", "sample", "prompt", "response", "old", "reward")
    places = (matrix.flatten().tolist() for matrix in (run.data.prompt_MC, run.data.sample_MC))
    rows = [dict(zip(names, values, strict=True)) for values in zip(*places, *columns.values(), strict=True)]
    for row in rows:
        row |= {name: unpadded(row[name]) for name in ("prompt", "response")}
        row["old"] = row["old"][: len(row["response"])]
    return rows


def given_rows(run: RunOf) -> list[list[tuple[list[int], list[int]]]]:
    """Returns the sequences of each row of an iteration: one, or that of the chosen and that of the rejected response,
    each as tokens and as 1 for each that is learned."""
    algorithm = run.config.algorithm
    marked = algorithm.assistant_tokens
    columns = columns_of(run, PROMPTS, *algorithm.responses, *filter(None, [marked]))
    rows = []
    for number, padded in enumerate(columns[PROMPTS]):
        prompt, row = unpadded(padded), []
        for response in (unpadded(columns[key][number]) for key in algorithm.responses):
            marks = columns[marked][number][: len(response)] if marked else [1] * len(response)
            row.append((prompt + response, [0] * len(prompt) + list(map(int, marks))))
        rows.append(row)
    return rows


# ---- whole steps ----------------------------------------------------------------------------------------------------


class ProcessorTracer(Tracer):
    """Measures seconds of a processor."""

    def now(self, category: str) -> float:
        return time.process_time()


def grpo_words(folder: Path) -> list[str]:
    """Returns the arguments for one optimizer step in an iteration, with GRPO's loss as TRL has it by default."""
    return [
        f"data.prompts={written([{'prompt': text} for text in work.prompts()], folder)}",
        *("data.max_prompt=64", work.REWARD),
        *(f"rollout_batch={work.PROMPTS}", f"samples_per_prompt={work.SAMPLES}"),
        *(f"mini_batch={work.PROMPTS * work.SAMPLES}", f"micro_batch={work.MICRO_BATCH}"),
        *(f"generation.{name}_new_tokens={work.LIMIT}" for name in ("min", "max")),
        *(f"optimizer.actor_lr={work.LR}", f"grpo.kl_coef={work.KL}", "grpo.kl_unbiased=true"),
    ]


def given_words(of: Work, folder: Path) -> list[str]:
    """Returns the arguments for one optimizer step in an iteration, over all rows."""
    rows = work.rows_of(of)
    return [
        *(f"data.prompts={written(rows, folder)}", "data.max_prompt=32"),
        *(f"rollout_batch={len(rows)}", f"mini_batch={len(rows)}"),
        f"micro_batch={work.GIVEN_MICRO_BATCH // of.sequences_per_row}",
        f"generation.max_new_tokens={work.MOST_TOKENS - 32}",
        f"optimizer.{'reward' if of.page == 'reward_model' else 'actor'}_lr={work.LR}",
    ]


def written(rows: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Writes a data set into a folder."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@contextmanager
def ends_at(lengths: list[int]) -> Iterator[None]:
    """Gives each request of an iteration a limit of its own."""
    real = Engine.submit

    def submit(engine: Engine, prompts, bits_RG, sampling, begun=None):
        assert len(prompts) == len(lengths), (len(prompts), len(lengths))
        own = [dataclasses.replace(sampling, max_new_tokens=length, min_new_tokens=length) for length in lengths]
        return real(engine, prompts, bits_RG, own, begun)

    with patch.object(Engine, "submit", submit):
        yield


def phases_of(run: RunOf) -> dict[str, float]:
    """Returns seconds of the last iteration by phase."""
    found = {"generation": 0.0, "reference": 0.0}  # the rest is training
    workflow = run.program.workload.workflow
    names = {call.name: "generation" for call in workflow.generate_calls}
    names |= {call.name: "reference" for call in workflow.placed_calls if call.model == "reference"}
    for name, _, start_s, end_s, iteration, _ in run.executor.recorder.spans:
        if iteration == run.number - 1 and name in names:
            found[names[name]] += end_s - start_s
    return found


def main(place: str, model: str, name: str, rank: str) -> None:
    torch.set_num_threads(1)
    use_fastest(torch.float32)
    page, folder = "grpo" if name == GRPO else KNOWN[name].page, Path(place)
    words = grpo_words(folder) if name == GRPO else given_words(KNOWN[name], folder)
    words += ["iterations=10000", "dtype=float32", f"lora.rank={rank}"]
    run = RunOf(presets.load("model", words, model, algorithm=page))
    run.executor.recorder = ProcessorTracer()
    commands, answer = work.commands()
    for told in commands:
        lengths, step = told.get("lengths"), work.Step()
        with ends_at(lengths):
            run.iteration()
        took = step.took()
        if lengths:
            found = [len(tokens) for tokens in run.responses[-1].values()]
            assert sorted(found) == sorted(lengths), (found, lengths)
            took |= phases_of(run)
        answer(**took)


if __name__ == "__main__":
    main(*sys.argv[1:])
