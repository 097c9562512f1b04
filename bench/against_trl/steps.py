"""Whole steps of SmolLM2-135M by both programs in turns: how many times faster, the floor, and peak memory.

Each program is one process of one thread, in float32, with AdamW and one optimizer step. While one works the other
waits. Seconds are a processor's, which other work on the machine changes little; those of the clock are in the rows,
too.

grpo: with a reference (beta 0.04), four prompts with eight samples each, micro-batches of 8, and responses of the same
    lengths. Neither computes old logprobs: ours come with the tokens, TRL takes those of the update. TRL's steps are
    taken with its default, checkpointing of activations, and without.
given: SFT, reward model and DPO on the same rows of spread lengths, micro-batches of four sequences, no checkpointing.
    Here a micro-batch is packed; TRL pads it, or packs rows before training (`packing=True`), whose packed row is then
    a micro-batch. Memory is the most that the process held, weights and interpreter included.
adapted: the same with adapters (LoRA; TRL's are peft's) by both programs, and of all weights by ours. Rank 16 and alpha
    32 in all linear layers but the output layer. With adapters, the reference of DPO is the base in both programs.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from bench.against_trl import work
from bench.against_trl.equality import PEER
from bench.against_trl.work import GRPO, Work
from bench.rows import REPOSITORY
from rlhf_spmd.config.model_folders import shape_of_folder
from rlhf_spmd.model.hf import load_tokenizer
from rlhf_spmd.plan.cost.seconds import head_flops, layer_flops

PROGRAMS = {"ours": None, "TRL": True, "TRL, no checkpointing": False}  # whether activations are checkpointed
LEAST = {  # promised times faster
    "full length": {"TRL": 1.5, "TRL, no checkpointing": 1.2},
    "spread lengths": {"TRL": 2.5, "TRL, no checkpointing": 2.0},
}
ROUNDS, GIVEN_ROUNDS, ADAPTED_ROUNDS = 3, 5, 3
PHASES = ("generation", "reference", "training")
RATE = "matrix_flops_per_s"
ABOUT = {"model": "SmolLM2-135M", "dtype": "float32", "threads": 1}  # of every row
RANK = 16
MEMORY = 0.7  # of adapters at most, as a share of that with all weights
Turns = Mapping[str, Callable[[int], dict]]  # program -> its step in a round


class Worker:
    """A process that makes steps on command."""

    def __init__(self, command: Sequence[str], log: Path):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self.log = log
        with log.open("w", encoding="utf-8") as stderr:
            self._process = subprocess.Popen(command, cwd=REPOSITORY, stderr=stderr, **pipes)

    def step(self, lengths: Sequence[int] = (), *, checkpointing: bool = False) -> dict[str, float]:
        """Returns what the worker measured in a step. Raises if the process has ended."""
        self.tell(lengths=list(lengths), checkpointing=checkpointing)
        return self.answer()

    def tell(self, **told) -> None:
        with suppress(BrokenPipeError):  # `answer` says why
            self._process.stdin.write(json.dumps(told) + "\n")

    def answer(self) -> dict:
        """Returns the worker's next line. Raises if the process has ended."""
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self._process.args[:3])} has ended:\n{self.log.read_text(encoding='utf-8')}")
        return json.loads(line)

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)


def ours(model: Path, folder: Path, name: str, rank: int = 0) -> Worker:
    """Starts our worker.

    rank: of adapters.
    """
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "bench.against_trl.our_steps", str(model), str(folder), name, str(rank)]
    return Worker(command, folder / f"ours-{rank}.log")


def theirs(model: Path, folder: Path, name: str, rank: int = 0) -> Worker:
    """Starts TRL's worker."""
    folder.mkdir(exist_ok=True)
    return Worker([str(PEER), "-m", "bench.against_trl.trl_steps", str(model), name, str(rank)], folder / "trl.log")


def rounds_of(name: str, turns: Turns, num_rounds: int) -> list[dict]:
    """Measures the steps of all programs in each round, in turns whose order changes, and the rate of matrix products.
    Round 0 warms up and is not counted."""
    found = []
    for number in range(num_rounds + 1):
        steps = {program: turns[program](number) for program in list(turns)[:: 1 if number % 2 else -1]}
        if number:
            found.append(steps | {RATE: matrix_rate()})
        told = ", ".join(f"{program} {step['step_s']:.1f} s" for program, step in steps.items())
        print(f"{name}, round {number}: {told}", flush=True)
    return found


def matrix_rate() -> float:
    """Measures the operations per second of a processor in a large product, by one thread: the best of a few."""
    torch.set_num_threads(1)
    size = 2048
    a, b = torch.randn(size, size), torch.randn(size, size)
    rates = []
    for _ in range(5):
        started = time.process_time()
        a @ b
        rates.append(2 * size**3 / (time.process_time() - started))
    return max(rates)


def against_floor(rounds: Sequence[Mapping], peer: str, flops: float, step_s: Mapping[str, float]) -> dict:
    """Returns the part of a row that tells how much faster ours is than a peer, and how near both are to the floor. The
    ratio is the median of the rounds' ratios, because a slow moment of the machine slows neighbours alike."""
    rate = statistics.median(one[RATE] for one in rounds)
    ratios = [one[peer]["step_s"] / one["ours"]["step_s"] for one in rounds]
    row = {"rounds": len(rounds), "ratios": ratios, "ratio": statistics.median(ratios), RATE: rate, "flops": flops}
    row |= {"floor_s": flops / rate}
    return row | {f"{name}_share": flops / rate / seconds for name, seconds in step_s.items()}


# ---- GRPO -----------------------------------------------------------------------------------------------------------


def grpo(model: Path, folder: Path) -> list[dict]:
    """Measures a row for each kind of lengths and each of TRL's settings."""
    workers = {"ours": ours(model, folder, GRPO), "TRL": theirs(model, folder, GRPO)}

    def turn(program: str, lengths: str, number: int) -> dict:
        told = work.lengths_of(lengths, number) if number else [2] * (work.PROMPTS * work.SAMPLES)
        worker = workers["ours" if program == "ours" else "TRL"]
        step = worker.step(told, checkpointing=bool(PROGRAMS[program]))
        return step | {"training": step["step_s"] - step["generation"] - step["reference"]}

    tokenizer, rows = load_tokenizer(model), []
    num_prompt_tokens = sum(len(tokenizer.encode(text)) for text in work.prompts())
    try:
        for lengths in work.LENGTHS:
            turns = {program: partial(turn, program, lengths) for program in PROGRAMS}
            rounds = rounds_of(lengths, turns, ROUNDS)
            flops = grpo_flops(model, lengths, num_prompt_tokens)
            rows += [grpo_row(lengths, peer, rounds, flops) for peer in LEAST[lengths]]
    finally:
        for worker in workers.values():
            worker.end()
    return rows


def grpo_flops(model: Path, lengths: str, num_prompt_tokens: int) -> float:
    """Returns operations of the matrix products of a step, the mean over the rounds: generation, with each prompt read
    once; the reference's pass; training, which is three passes. Logits of response tokens only."""
    shape, counts = shape_of_folder(str(model)), []
    mean_prompt = num_prompt_tokens / work.PROMPTS

    def layers(tokens: float, context: float) -> float:
        return shape.num_layers * layer_flops(shape, tokens, context)

    for number in range(1, ROUNDS + 1):
        responses = work.lengths_of(lengths, number)
        whole = sum(layers(mean_prompt + one, (mean_prompt + one) / 2) for one in responses)
        logits = head_flops(shape, sum(responses))
        decoded = sum(layers(one - 1, mean_prompt + one / 2) for one in responses)
        generation = layers(num_prompt_tokens, mean_prompt / 2) + decoded + logits
        counts.append(generation + 4 * (whole + logits))
    return statistics.fmean(counts)


def grpo_row(lengths: str, peer: str, rounds: Sequence[Mapping], flops: float) -> dict:
    """Returns medians over the rounds."""
    tokens = [sum(work.lengths_of(lengths, number)) for number in range(1, len(rounds) + 1)]
    row = ABOUT | {"work": lengths, "peer": peer, "responses": work.PROMPTS * work.SAMPLES}
    row["tokens"] = statistics.fmean(tokens)
    for who, program in (("ours", "ours"), ("peer", peer)):
        keys = {"s": "step_s", "wall_s": "wall_s"} | {f"{phase}_s": phase for phase in PHASES}
        row |= {f"{who}_{name}": statistics.median(one[program][key] for one in rounds) for name, key in keys.items()}
    row |= against_floor(rounds, peer, flops, {who: row[f"{who}_s"] for who in ("ours", "peer")})
    row |= {"promised": LEAST[lengths][peer], "ok": row["ratio"] >= LEAST[lengths][peer]}
    return row


# ---- given responses ------------------------------------------------------------------------------------------------


def given(model: Path, folder: Path, works: Sequence[Work]) -> list[dict]:
    """Measures a row for each kind of work."""
    rows = []
    for number, of in enumerate(works):
        place = (model, folder / str(number), of.name)
        rows.append(given_row(of, model, in_turns(of, {"ours": ours(*place), "peer": theirs(*place)}, GIVEN_ROUNDS)))
    return rows


def adapted(model: Path, folder: Path, works: Sequence[Work]) -> list[dict]:
    """Measures a row for each kind of work."""
    rows = []
    for number, of in enumerate(works):
        place = (model, folder / str(number), of.name)
        workers = {"full": ours(*place), "ours": ours(*place, RANK), "peer": theirs(*place, RANK)}
        rows.append(adapted_row(of, in_turns(of, workers, ADAPTED_ROUNDS)))
    return rows


def in_turns(of: Work, workers: Mapping[str, Worker], num_rounds: int) -> list[dict]:
    try:
        turns = {name: lambda _, worker=worker: worker.step() for name, worker in workers.items()}
        return rounds_of(of.name, turns, num_rounds)
    finally:
        for worker in workers.values():
            worker.end()


def measured(rounds: Sequence[Mapping], programs: Sequence[str]) -> dict:
    """Returns the part of a row that tells the seconds of each program, medians over the rounds, and its memory."""
    row = {}
    for name in programs:
        row |= {f"{name}_{key}": statistics.median(one[name][key] for one in rounds) for key in ("step_s", "wall_s")}
        row[f"{name}_peak_bytes"] = max(one[name]["peak_bytes"] for one in rounds)
    return row


def given_row(of: Work, model: Path, rounds: Sequence[Mapping]) -> dict:
    lengths = lengths_of(of, model)
    row = ABOUT | {"work": of.name, "sequences": len(lengths), "tokens": sum(map(sum, lengths))}
    row |= measured(rounds, ("ours", "peer"))
    step_s = {name: row[f"{name}_step_s"] for name in ("ours", "peer")}
    row |= against_floor(rounds, "peer", given_flops(of, model, lengths), step_s)
    row |= {"promised": of.promised, "ok": row["ratio"] >= of.promised}
    return row


def adapted_row(of: Work, rounds: Sequence[Mapping]) -> dict:
    row = ABOUT | {"rank": RANK, "case": of.name, "rounds": len(rounds)} | measured(rounds, ("full", "ours", "peer"))
    row["ratio"] = statistics.median(one["peer"]["step_s"] / one["ours"]["step_s"] for one in rounds)
    row |= {"memory_share": row["ours_peak_bytes"] / row["full_peak_bytes"], "promised": MEMORY}
    smaller = row["memory_share"] <= MEMORY and row["ours_peak_bytes"] < row["peer_peak_bytes"]
    row["ok"] = smaller and row["ratio"] > 1
    return row


def lengths_of(of: Work, model: Path) -> list[tuple[int, int]]:
    """Returns the tokens of the prompt and of the response of each sequence, the end token included."""
    tokenizer, found = load_tokenizer(model), []
    for row in work.rows_of(of):
        num_prompt = len(tokenizer.encode(row["prompt"]))
        for column in ("completion", "chosen", "rejected"):
            if column in row:
                found.append((num_prompt, len(tokenizer.encode(row["prompt"] + row[column])) - num_prompt + 1))
    return found


def given_flops(of: Work, model: Path, lengths: Sequence[tuple[int, int]]) -> float:
    """Returns operations of the matrix products of a step: three passes, and one of the reference. Logits of the tokens
    that are learned; a reward model has none."""
    shape = shape_of_folder(str(model))
    layers = sum(shape.num_layers * layer_flops(shape, sum(both), sum(both) / 2) for both in lengths)
    logits = 0 if of.page == "reward_model" else head_flops(shape, sum(response for _, response in lengths))
    return (4 if of.page == "dpo" else 3) * (layers + logits)
