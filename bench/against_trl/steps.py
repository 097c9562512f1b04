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

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from bench.against_trl import work
from bench.against_trl.work import GRPO, Work
from bench.speed.generate_peers import smollm2
from bench.speed.roofline import elapsed_s, in_turns
from rlhf_spmd.config.model_folders import shape_of_folder
from rlhf_spmd.model.hf import load_tokenizer
from rlhf_spmd.plan.cost.seconds import head_flops, layer_flops

PROGRAMS = {"ours": False, "TRL": True, "TRL, no checkpointing": False}  # whether activations are checkpointed
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
Steps = dict[str, Callable[..., dict]]  # program -> its step


@contextmanager
def workers(folder: Path, name: str, **ranks: int) -> Iterator[Steps]:
    """Starts workers of some work: TRL's as `peer`, and ours.

    ranks: of their adapters.
    """
    folder.mkdir(exist_ok=True)
    with ExitStack() as started:
        steps = {}
        for who, rank in ranks.items():
            words = (str(smollm2()), name, str(rank))
            ours = [sys.executable, "-m", "bench.against_trl.ours", str(folder), *words]
            command = work.trl_worker(folder, *words) if who == "peer" else ours
            steps[who] = started.enter_context(work.worker(command, folder / f"{who}.log"))
        yield steps


def rounds_of(steps: Mapping[str, Callable[[], dict]], num_rounds: int) -> list[dict]:
    """Measures the steps of all programs in each round, and the rate of matrix products. Round 0 warms up and is not
    counted."""
    return in_turns(steps | {RATE: matrix_rate}, num_rounds + 1)[1:]


def matrix_rate() -> float:
    """Measures the operations per second of a processor in a large product, by one thread: the best of a few."""
    torch.set_num_threads(1)
    size = 2048
    product = partial(torch.matmul, *torch.randn(2, size, size))
    return 2 * size**3 / min(elapsed_s(product, time.process_time) for _ in range(5))


def against_floor(rounds: Sequence[Mapping], peer: str, flops: float, step_s: Mapping[str, float]) -> dict:
    """Returns the part of a row that tells how much faster ours is than a peer, and how near both are to the floor. The
    ratio is the median of the rounds' ratios, because a slow moment of the machine slows neighbours alike."""
    rate = statistics.median(one[RATE] for one in rounds)
    ratios = [one[peer]["step_s"] / one["ours"]["step_s"] for one in rounds]
    row = {"rounds": len(rounds), "ratios": ratios, "ratio": statistics.median(ratios), RATE: rate, "flops": flops}
    row |= {"floor_s": flops / rate}
    return row | {f"{name}_share": flops / rate / seconds for name, seconds in step_s.items()}


# ---- GRPO -----------------------------------------------------------------------------------------------------------


def grpo(folder: Path) -> list[dict]:
    """Measures a row for each kind of lengths and each of TRL's settings."""
    rows = []
    with workers(folder, GRPO, ours=0, peer=0) as steps:
        for lengths in work.LENGTHS:
            told = [work.lengths_of(lengths, number) for number in range(1, ROUNDS + 1)]
            turns = {
                name: partial(grpo_step, steps.get(name, steps["peer"]), iter([[2] * len(told[0]), *told]), checkpoints)
                for name, checkpoints in PROGRAMS.items()
            }
            rounds, flops = rounds_of(turns, ROUNDS), grpo_flops(told)
            rows += [grpo_row(lengths, peer, told, rounds, flops) for peer in LEAST[lengths]]
    return rows


def grpo_step(step: Callable[..., dict], lengths: Iterator[list[int]], checkpointing: bool) -> dict:
    """Makes a step of GRPO -> its seconds, by phase too.

    lengths: of the responses of this step and those that follow.
    """
    found = step(lengths=next(lengths), checkpointing=checkpointing)
    return found | {"training": found["step_s"] - found["generation"] - found["reference"]}


def grpo_flops(told: Sequence[Sequence[int]]) -> float:
    """Returns operations of the matrix products of a step, the mean over the rounds: generation, with each prompt read
    once; the reference's pass; training, which is three passes. Logits of response tokens only.

    told: lengths of responses in each round.
    """
    shape, tokenizer, counts = shape_of_folder(str(smollm2())), load_tokenizer(smollm2()), []
    num_prompt_tokens = sum(len(tokenizer.encode(text)) for text in work.prompts())
    mean_prompt = num_prompt_tokens / work.PROMPTS

    def layers(tokens: float, context: float) -> float:
        return shape.num_layers * layer_flops(shape, tokens, context)

    for responses in told:
        whole = sum(layers(mean_prompt + one, (mean_prompt + one) / 2) for one in responses)
        logits = head_flops(shape, sum(responses))
        decoded = sum(layers(one - 1, mean_prompt + one / 2) for one in responses)
        generation = layers(num_prompt_tokens, mean_prompt / 2) + decoded + logits
        counts.append(generation + 4 * (whole + logits))
    return statistics.fmean(counts)


def grpo_row(lengths: str, peer: str, told: Sequence[Sequence[int]], rounds: Sequence[Mapping], flops: float) -> dict:
    """Returns medians over the rounds."""
    row = ABOUT | {"work": lengths, "peer": peer, "responses": len(told[0])}
    row["tokens"] = statistics.fmean(map(sum, told))
    for who, program in (("ours", "ours"), ("peer", peer)):
        keys = {"s": "step_s", "wall_s": "wall_s"} | {f"{phase}_s": phase for phase in PHASES}
        row |= {f"{who}_{name}": statistics.median(one[program][key] for one in rounds) for name, key in keys.items()}
    row |= against_floor(rounds, peer, flops, {who: row[f"{who}_s"] for who in ("ours", "peer")})
    row |= {"promised": LEAST[lengths][peer], "ok": row["ratio"] >= LEAST[lengths][peer]}
    return row


# ---- given responses ------------------------------------------------------------------------------------------------


def given(folder: Path) -> list[dict]:
    """Measures a row for each kind of work."""
    return [given_row(of, rounds_on_given(folder, of, GIVEN_ROUNDS, ours=0, peer=0)) for of in work.WORKS.values()]


def adapted(folder: Path) -> list[dict]:
    """Measures a row for each kind of work."""
    ranks = {"full": 0, "ours": RANK, "peer": RANK}
    return [adapted_row(of, rounds_on_given(folder, of, ADAPTED_ROUNDS, **ranks)) for of in work.ADAPTED.values()]


def rounds_on_given(folder: Path, of: Work, num_rounds: int, **ranks: int) -> list[dict]:
    with workers(folder / of.name, of.name, **ranks) as steps:
        return rounds_of(steps, num_rounds)


def measured(rounds: Sequence[Mapping], programs: Sequence[str]) -> dict:
    """Returns the part of a row that tells the seconds of each program, medians over the rounds, and its memory."""
    row = {}
    for name in programs:
        row |= {f"{name}_{key}": statistics.median(one[name][key] for one in rounds) for key in ("step_s", "wall_s")}
        row[f"{name}_peak_bytes"] = max(one[name]["peak_bytes"] for one in rounds)
    return row


def given_row(of: Work, rounds: Sequence[Mapping]) -> dict:
    lengths = lengths_of(of)
    row = ABOUT | {"work": of.name, "sequences": len(lengths), "tokens": sum(map(sum, lengths))}
    row |= measured(rounds, ("ours", "peer"))
    step_s = {name: row[f"{name}_step_s"] for name in ("ours", "peer")}
    row |= against_floor(rounds, "peer", given_flops(of, lengths), step_s)
    row |= {"promised": of.promised, "ok": row["ratio"] >= of.promised}
    return row


def adapted_row(of: Work, rounds: Sequence[Mapping]) -> dict:
    row = ABOUT | {"rank": RANK, "case": of.name, "rounds": len(rounds)} | measured(rounds, ("full", "ours", "peer"))
    row["ratio"] = statistics.median(one["peer"]["step_s"] / one["ours"]["step_s"] for one in rounds)
    row |= {"memory_share": row["ours_peak_bytes"] / row["full_peak_bytes"], "promised": MEMORY}
    smaller = row["memory_share"] <= MEMORY and row["ours_peak_bytes"] < row["peer_peak_bytes"]
    row["ok"] = smaller and row["ratio"] > 1
    return row


def lengths_of(of: Work) -> list[tuple[int, int]]:
    """Returns the tokens of the prompt and of the response of each sequence, the end token included."""
    tokenizer = load_tokenizer(smollm2())

    def count(text: str) -> int:
        return len(tokenizer.encode(text))

    rows = ((row.pop("prompt"), row) for row in work.rows_of(of))
    return [(count(prompt), count(prompt + text) - count(prompt) + 1) for prompt, row in rows for text in row.values()]


def given_flops(of: Work, lengths: Sequence[tuple[int, int]]) -> float:
    """Returns operations of the matrix products of a step: three passes, and one of the reference. Logits of the tokens
    that are learned; a reward model has none."""
    shape = shape_of_folder(str(smollm2()))
    layers = sum(shape.num_layers * layer_flops(shape, sum(both), sum(both) / 2) for both in lengths)
    logits = 0 if of.page == "reward_model" else head_flops(shape, sum(response for _, response in lengths))
    return (4 if of.page == "dpo" else 3) * (layers + logits)
