"""Whole steps of SFT, reward model and DPO on SmolLM2-135M by both programs in turns: times faster, and peak memory.

Each program is one process of one thread for each kind of work, in float32, with the same rows of spread lengths
(given_work.py), micro-batches of four sequences, one optimizer step over all rows, AdamW, and no checkpointing of
activations. Here a micro-batch is packed; TRL pads it, or packs rows before training (`packing=True`), whose packed
row is then a micro-batch. While one works the other waits. Seconds are a processor's, as in steps.py; memory is the
most that the process held, weights and interpreter included.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.against_trl import given_work
from bench.against_trl.equality import PEER
from bench.against_trl.given_work import WORKS, GivenWork
from bench.against_trl.steps import RATE, Worker, matrix_rate, shape_of
from rlhf_spmd.model.hf import load_tokenizer
from rlhf_spmd.plan.cost.seconds import head_flops, layer_flops

ROUNDS = 5


def measured(model: Path, folder: Path) -> list[dict]:
    """A row for each kind of work."""
    rows = []
    for number, of in enumerate(WORKS.values()):
        scratch = folder / str(number)
        commands = {"ours": ours(of, model, scratch), "peer": theirs(of, model)}
        rows.append(row_of(of, model, rounds_of(of, commands, scratch, ROUNDS)))
        print(show(rows[-1]), flush=True)
    return rows


def ours(of: GivenWork, model: Path, folder: Path, rank: int = 0) -> list[str]:
    """The command of our worker. rank: of adapters."""
    return [sys.executable, "-m", "bench.against_trl.our_given_steps", str(model), str(folder), of.name, str(rank)]


def theirs(of: GivenWork, model: Path, rank: int = 0) -> list[str]:
    """The command of TRL's worker."""
    return [str(PEER), "-m", "bench.against_trl.trl_given_steps", str(model), of.name, str(rank)]


def rounds_of(of: GivenWork, commands: Mapping[str, Sequence[str]], folder: Path, num_rounds: int) -> list[dict]:
    """The steps of all programs in each round, in turns whose order changes, and the rate of matrix products. The
    first round is not counted."""
    folder.mkdir()
    workers = {name: Worker(command, folder / f"{name}.log") for name, command in commands.items()}
    found = []
    try:
        for number in range(num_rounds + 1):
            steps = {name: workers[name].step() for name in list(workers)[:: 1 if number % 2 else -1]}
            if number:
                found.append(steps | {RATE: matrix_rate()})
            told = ", ".join(f"{name} {step['step_s']:.1f} s" for name, step in steps.items())
            print(f"{of.name}, round {number}: {told}", flush=True)
    finally:
        for worker in workers.values():
            worker.end()
    return found


def row_of(of: GivenWork, model: Path, rounds: Sequence[dict]) -> dict:
    """Medians over the rounds; the ratio is the median of the rounds' ratios."""
    lengths = lengths_of(of, model)
    flops, rate = step_flops(of, model, lengths), statistics.median(one[RATE] for one in rounds)
    ratios = [one["peer"]["step_s"] / one["ours"]["step_s"] for one in rounds]
    row = {"model": "SmolLM2-135M", "dtype": "float32", "threads": 1, "work": of.name, "rounds": len(rounds)}
    row |= {"sequences": len(lengths), "tokens": sum(map(sum, lengths)), "ratios": ratios}
    for name in ("ours", "peer"):
        row |= {f"{name}_{key}": statistics.median(one[name][key] for one in rounds) for key in ("step_s", "wall_s")}
        row[f"{name}_peak_bytes"] = max(one[name]["peak_bytes"] for one in rounds)
        row[f"{name}_share"] = flops / rate / row[f"{name}_step_s"]
    row |= {RATE: rate, "flops": flops, "floor_s": flops / rate, "ratio": statistics.median(ratios)}
    return row | {"promised": of.promised, "ok": row["ratio"] >= of.promised}


def lengths_of(of: GivenWork, model: Path) -> list[tuple[int, int]]:
    """Tokens of the prompt and of the response of each sequence, the end token included."""
    tokenizer, found = load_tokenizer(model), []
    for row in given_work.rows_of(of):
        num_prompt = len(tokenizer.encode(row["prompt"]))
        for column in ("completion", "chosen", "rejected"):
            if column in row:
                found.append((num_prompt, len(tokenizer.encode(row["prompt"] + row[column])) - num_prompt + 1))
    return found


def step_flops(of: GivenWork, model: Path, lengths: Sequence[tuple[int, int]]) -> float:
    """Operations of the matrix products of a step: three passes, and one of the reference. Logits of the tokens that
    are learned; a reward model has none."""
    shape = shape_of(model)
    layers = sum(shape.num_layers * layer_flops(shape, sum(both), sum(both) / 2) for both in lengths)
    logits = 0 if of.page == "reward_model" else head_flops(shape, sum(response for _, response in lengths))
    return (4 if of.page == "dpo" else 3) * (layers + logits)


def show(row: Mapping) -> str:
    verdict = "" if row["ok"] else f"  BELOW {row['promised']:g}"
    ours, theirs = (
        f"{row[f'{who}_step_s']:.1f} s, {row[f'{who}_peak_bytes'] / 2**30:.2f} GiB, floor {row[f'{who}_share']:.0%}"
        for who in ("ours", "peer")
    )
    return f"{row['work']}: {row['ratio']:.2f} times as fast as TRL{verdict}\n  ours {ours}; TRL {theirs}"
