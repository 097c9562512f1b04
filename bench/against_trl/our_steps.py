"""Our worker for whole steps: `python -m bench.against_trl.our_steps MODEL FOLDER WORK [RANK]`.

Iterations of the runtime on one rank, in float32, each with one optimizer step, but that each waits for a command. With
GRPO a request's limit is the length that the command gives; no end token is drawn before it. RANK: of adapters of all
linear layers; 0: all weights train.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

from bench.against_trl import work
from bench.against_trl.work import ADAPTED, GRPO, WORKS, Work
from bench.speed.generate_peers import use_fastest
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import Config
from rlhf_spmd.runtime.generation.engine import Engine
from rlhf_spmd.runtime.world.trace import Tracer
from tests.runs import RunOf

REWARD = "from bench.against_trl.work import reward\n\n\ndef letters(prompts, responses):\n"
REWARD += "    return [reward(response) for response in responses]\n"


def main(model: str, folder: str, name: str, rank: str = "0") -> None:
    torch.set_num_threads(1)
    use_fastest(torch.float32)
    words = grpo_words(Path(folder)) if name == GRPO else given_words((WORKS | ADAPTED)[name], Path(folder))
    run = RunOf(
        config_of(model, [*words, f"lora.rank={rank}"], "grpo" if name == GRPO else (WORKS | ADAPTED)[name].page)
    )
    run.executor.recorder = ProcessorTracer()
    told, answers = work.commands()
    for one in told:
        step = work.Step()
        with ends_at(one.lengths):
            run.iteration()
        took = step.took()
        if one.lengths:
            found = [len(tokens) for tokens in run.responses[-1].values()]
            assert sorted(found) == sorted(one.lengths), (found, one.lengths)
            took |= phases_of(run)
        work.answer(answers, **took)


class ProcessorTracer(Tracer):
    """Measures seconds of a processor."""

    def now(self, category: str) -> float:
        return time.process_time()


def config_of(model: str, words: list[str], page: str) -> Config:
    return presets.load("model", ["iterations=10000", "dtype=float32", *words], model, algorithm=page)


def grpo_words(folder: Path) -> list[str]:
    """Returns the arguments for one optimizer step in an iteration, with GRPO's loss as TRL has it by default."""
    path, rows = _written([{"prompt": text} for text in work.prompts()], folder), work.PROMPTS * work.SAMPLES
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    words = [f"data.prompts={path}", f"reward_function={folder / 'reward.py'}:letters"]
    words += [f"rollout_batch={work.PROMPTS}", f"samples_per_prompt={work.SAMPLES}", f"mini_batch={rows}"]
    words += [f"micro_batch={work.MICRO_BATCH}", f"generation.max_new_tokens={work.LIMIT}"]
    words += ["data.max_prompt=64", f"generation.min_new_tokens={work.LIMIT}", f"optimizer.actor_lr={work.LR}"]
    return [*words, f"grpo.kl_coef={work.KL}", "grpo.kl_unbiased=true"]


def given_words(of: Work, folder: Path) -> list[str]:
    """Returns the arguments for one optimizer step in an iteration, over all rows."""
    rows = work.rows_of(of)
    words = [f"data.prompts={_written(rows, folder)}", f"rollout_batch={len(rows)}", f"mini_batch={len(rows)}"]
    words += [f"micro_batch={work.GIVEN_MICRO_BATCH // of.sequences_per_row}"]
    words += ["data.max_prompt=32", f"generation.max_new_tokens={work.MOST_TOKENS - 32}"]
    return [*words, f"optimizer.{'reward' if of.page == 'reward_model' else 'actor'}_lr={work.LR}"]


def _written(rows: list[dict[str, str]], folder: Path) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@contextmanager
def ends_at(lengths: list[int]) -> Iterator[None]:
    """Gives each request of an iteration a limit of its own."""
    real = Engine.submit

    def submit(engine: Engine, prompts, bits_RG, sampling, begun=None):
        assert len(prompts) == len(lengths), (len(prompts), len(lengths))
        own = [replace(sampling, max_new_tokens=length, min_new_tokens=length) for length in lengths]
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


if __name__ == "__main__":
    main(*sys.argv[1:])
