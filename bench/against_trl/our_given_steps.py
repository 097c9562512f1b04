"""Our worker for whole steps on given responses: `python -m bench.against_trl.our_given_steps MODEL FOLDER WORK
[RANK]`. RANK: of adapters of all linear layers; 0: all weights train."""

import json
import sys
import time
from pathlib import Path

import torch

from bench.against_trl import given_work, work
from bench.against_trl.given_work import ADAPTED, WORKS, GivenWork
from bench.speed.generate_peers import use_fastest
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import Config
from tests.runs import RunOf


def main(model: str, folder: str, name: str, rank: str = "0") -> None:
    torch.set_num_threads(1)
    use_fastest(torch.float32)
    run = RunOf(config_of((WORKS | ADAPTED)[name], model, Path(folder), f"lora.rank={rank}"))
    told, answers = work.commands()
    for _ in told:
        started, began = time.process_time(), time.perf_counter()
        run.iteration()
        step_s, wall_s = time.process_time() - started, time.perf_counter() - began
        work.answer(answers, step_s=step_s, wall_s=wall_s, peak_bytes=given_work.peak_bytes())


def config_of(of: GivenWork, model: str, folder: Path, *more: str) -> Config:
    """One optimizer step in an iteration, over all rows."""
    rows, path = given_work.rows_of(of), folder / f"{of.page}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    micro_batch = given_work.MICRO_BATCH // of.sequences_per_row
    words = [f"data.prompts={path}", f"rollout_batch={len(rows)}", f"mini_batch={len(rows)}", "iterations=10000"]
    words += [f"micro_batch={micro_batch}", "dtype=float32", "data.max_prompt=32"]
    words += [f"generation.max_new_tokens={given_work.MOST_TOKENS - 32}"]
    words += [f"optimizer.{'reward' if of.page == 'reward_model' else 'actor'}_lr={given_work.LR}"]
    return presets.load("model", [*words, *more], model, algorithm=of.page)


if __name__ == "__main__":
    main(*sys.argv[1:])
