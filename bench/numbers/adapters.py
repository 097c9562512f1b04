"""Does training adapters (LoRA) of rank 8 and rank 1 learn as well as training all weights?

The same runs with all weights, rank 8 and rank 1, on five seeds: GRPO on the embedded sums (the share of held-out
problems solved), SFT and DPO on the embedded answers and pairs (held-out nats per token; share of held-out pairs ranked
right). All options are those of the presets, so rates are ten times higher with adapters. A mean that is more than two
points, or 0.02 nats, worse than that of full training is not ok.

Cost: ten minutes of one core for GRPO, as long for the others. Runs have one rank and one thread. Rows are added as
they come: an interrupted bench goes on where it was.
Command: python -m bench adapters [TASK ...]
"""

import os
import tempfile
from itertools import product
from pathlib import Path
from statistics import mean

from bench.rows import Arguments, fill, read_rows, train
from bench.tables import ended
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.plan.program.tensors import trained_weights_of, weights_of

SEEDS = (0, 1, 2, 3, 4)
RANKS = (0, 8, 1)  # 0: all weights
TASKS = {  # preset, words, measure of a row of evaluations.jsonl, whether more of it is better
    "grpo": ("arithmetic", (), "mean@1", True),
    "sft": ("tiny", ("iterations=40", "eval.every=10"), "loss", False),
    "dpo": ("tiny", ("iterations=20", "eval.every=5"), "accuracy", True),
}
WORST = 0.02  # how much worse than full training


def trained_share(task: str, rank: int) -> float:
    """Returns the share of the weights of the model that trains."""
    preset, words, *_ = TASKS[task]
    config = presets.load(preset, [*words, f"lora.rank={rank}"], algorithm=task)
    shape = make_workload(config).shape(config.main_role)
    numbers = [sum(one.rows * one.columns for one in of(shape)) for of in (trained_weights_of, weights_of)]
    return numbers[0] / numbers[1]


def measured(case: dict) -> dict:
    """Returns the row of a run."""
    task, rank = case["task"], case["rank"]
    preset, words, measure, _ = TASKS[task]
    options = ["--preset", preset, "--algorithm", task, f"seed={case['seed']}", f"lora.rank={rank}", *words]
    with tempfile.TemporaryDirectory() as runs:
        options += ["--runs", runs]
        result, _ = train(1, options, environment={**os.environ, "OMP_NUM_THREADS": "1"})
        held_out = read_rows(Path(result["run_dir"]) / "evaluations.jsonl")
    row = {"measure": measure, "trained_share": trained_share(task, rank), "iterations": result["iterations"]}
    return row | {"first": held_out[0][measure], "last": held_out[-1][measure]}


def judged(rows: list[dict]) -> list[dict]:
    """Returns the rows in order of tasks, with the distance of each rank's mean from that of full training; ok where it
    is small."""
    made = []
    for row in sorted(rows, key=lambda row: list(TASKS).index(row["task"])):
        mine = [one for one in rows if one["task"] == row["task"]]
        of = {rank: [one["last"] for one in mine if one["rank"] == rank] for rank in (0, row["rank"])}
        worse = (mean(of[0]) - mean(of[row["rank"]])) * (1 if TASKS[row["task"]][3] else -1)
        made.append(row | {"worse_than_full": worse, "ok": worse <= WORST})
    return made


def main(arguments: list[str]) -> int:
    parser = Arguments("adapters", __doc__, fills=True)
    parser.add_some("tasks", TASKS, "TASK")
    tasks = parser.parse_args(arguments).tasks
    keys = product(tasks, SEEDS, RANKS)
    rows = fill("adapters", [{"task": t, "rank": rank, "seed": s} for t, s, rank in keys], measured, finish=judged)
    return ended("adapters", [row for row in rows if row["task"] in tasks])
