"""Our worker for whole steps: `python -m bench.against_trl.our_steps MODEL FOLDER PROMPT...`.

Iterations of the runtime on one rank, in float32, but that each waits for a command, and that a request's limit is the
length that the command gives; no end token is drawn before it.
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
from bench.speed.generate_peers import use_fastest
from rlhf_spmd.config import presets
from rlhf_spmd.runtime.generation.engine import Engine
from rlhf_spmd.runtime.observe.trace import Tracer
from tests.runs import RunOf

REWARD = "from bench.against_trl.work import reward\n\n\ndef letters(prompts, responses):\n"
REWARD += "    return [reward(response) for response in responses]\n"


def main(model: str, folder: str, *prompts: str) -> None:
    torch.set_num_threads(1)
    use_fastest(torch.float32)
    run = RunOf(config_of(model, Path(folder), prompts))
    run.executor.recorder = ProcessorTracer()
    told, answers = work.commands()
    for one in told:
        started, began = time.process_time(), time.perf_counter()
        with ends_at(one.lengths):
            run.iteration()
        step_s, wall_s = time.process_time() - started, time.perf_counter() - began
        found = [len(tokens) for tokens in run.responses[-1].values()]
        assert sorted(found) == sorted(one.lengths), (found, one.lengths)
        work.answer(answers, step_s=step_s, wall_s=wall_s, **phases_of(run))


class ProcessorTracer(Tracer):
    """Measures seconds of a processor."""

    def now(self, category: str) -> float:
        return time.process_time()


def config_of(model: str, folder: Path, prompts: tuple[str, ...]):
    """One optimizer step in an iteration, with GRPO's loss as TRL has it by default."""
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in prompts), encoding="utf-8"
    )
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    rows = work.PROMPTS * work.SAMPLES
    words = [f"data.prompts={folder / 'prompts.jsonl'}", f"reward_function={folder / 'reward.py'}:letters"]
    words += [f"rollout_batch={work.PROMPTS}", f"samples_per_prompt={work.SAMPLES}", f"mini_batch={rows}"]
    words += [f"micro_batch={work.MICRO_BATCH}", "iterations=10000", "data.max_prompt=64", "dtype=float32"]
    words += [f"generation.max_new_tokens={work.LIMIT}", f"generation.min_new_tokens={work.LIMIT}"]
    words += [f"grpo.kl_coef={work.KL}", "grpo.kl_unbiased=true", f"optimizer.actor_lr={work.LR}"]
    return presets.load("model", words, model, algorithm="grpo")


@contextmanager
def ends_at(lengths: list[int]) -> Iterator[None]:
    """Gives each request of an iteration a limit of its own."""
    real = Engine.submit

    def submit(engine: Engine, prompts, bits_RG, sampling):
        assert len(prompts) == len(lengths), (len(prompts), len(lengths))
        own = [replace(sampling, max_new_tokens=length, min_new_tokens=length) for length in lengths]
        return real(engine, prompts, bits_RG, own)

    with patch.object(Engine, "submit", submit):
        yield


def phases_of(run: RunOf) -> dict[str, float]:
    """Seconds of the last iteration by phase."""
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
