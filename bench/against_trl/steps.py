"""Whole GRPO steps of SmolLM2-135M by both programs in turns: how many times faster, where the time goes, the floor.

Each program is one process of one thread, in float32, with a reference (beta 0.04), the same four prompts with
eight samples each, micro-batches of 8, one optimizer step, AdamW, and responses of the same lengths. Neither computes
old logprobs: ours come with the tokens, TRL takes those of the update. While one works the other waits. TRL's steps
are taken with its default, checkpointing of activations, and without. Seconds are a processor's, which other work on
the machine changes little; those of the clock are in the rows, too.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from bench.against_trl import work
from bench.against_trl.equality import PEER
from bench.rows import REPOSITORY
from rlhf_spmd import embedded
from rlhf_spmd.model.hf import load_tokenizer
from rlhf_spmd.plan.cost.seconds import head_flops, layer_flops
from rlhf_spmd.plan.workload import ModelShape

PROGRAMS = {"ours": None, "TRL": True, "TRL, no checkpointing": False}  # whether activations are checkpointed
LEAST = {  # promised times faster
    "full length": {"TRL": 1.5, "TRL, no checkpointing": 1.2},
    "spread lengths": {"TRL": 2.5, "TRL, no checkpointing": 2.0},
}
ROUNDS = 3
PHASES = ("generation", "reference", "training")
RATE = "matrix_flops_per_s"


class Worker:
    """A process that makes steps on command."""

    def __init__(self, command: Sequence[str], log: Path):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self.log = log
        with log.open("w", encoding="utf-8") as stderr:
            self._process = subprocess.Popen(command, cwd=REPOSITORY, stderr=stderr, **pipes)

    def step(self, lengths: Sequence[int] = (), *, checkpointing: bool = False) -> dict[str, float]:
        """What the worker measured in a step. Raises if the process has ended."""
        self.tell(lengths=list(lengths), checkpointing=checkpointing)
        return self.answer()

    def tell(self, **told) -> None:
        with suppress(BrokenPipeError):  # answer() says why
            self._process.stdin.write(json.dumps(told) + "\n")

    def answer(self) -> dict:
        """The worker's next line. Raises if the process has ended."""
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self._process.args[:3])} has ended:\n{self.log.read_text(encoding='utf-8')}")
        return json.loads(line)

    def end(self) -> None:
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(timeout=60)


def measured(model: Path, folder: Path) -> list[dict]:
    """A row for each kind of lengths and each of TRL's settings."""
    prompts = embedded.path_of("sentiment_prompts.txt").read_text(encoding="utf-8").splitlines()[: work.PROMPTS]
    workers = {
        "TRL": Worker([str(PEER), "-m", "bench.against_trl.trl_steps", str(model), *prompts], folder / "trl.log"),
        "ours": Worker(
            [sys.executable, "-m", "bench.against_trl.our_steps", str(model), str(folder), *prompts],
            folder / "ours.log",
        ),
    }
    try:
        found = {name: rounds_of(name, workers) for name in work.WORKS}
    finally:
        for worker in workers.values():
            worker.end()
    tokenizer = load_tokenizer(model)
    num_prompt_tokens = sum(len(tokenizer.encode(text)) for text in prompts)
    rows = [
        row_of(name, peer, found[name], step_flops(model, name, num_prompt_tokens))
        for name in work.WORKS
        for peer in LEAST[name]
    ]
    for row in rows:
        print(show(row), flush=True)
    return rows


def rounds_of(name: str, workers: Mapping[str, Worker]) -> dict[str, list[dict]]:
    """The steps of each program, in turns whose order changes; between them, the rate of matrix products. The first
    round is short and not counted."""
    found: dict[str, list[dict]] = {program: [] for program in PROGRAMS}
    found[RATE] = []
    for number in range(ROUNDS + 1):
        lengths = work.lengths_of(name, number) if number else [2] * (work.PROMPTS * work.SAMPLES)
        for program in list(PROGRAMS)[:: 1 if number % 2 else -1]:
            worker = workers["ours" if program == "ours" else "TRL"]
            step = worker.step(lengths, checkpointing=bool(PROGRAMS[program]))
            if number:
                found[program].append(step | {"training": step["step_s"] - step["generation"] - step["reference"]})
        if number:
            found[RATE].append({RATE: matrix_rate()})
        took = ", ".join(f"{key} {steps[-1]['step_s']:.1f} s" for key, steps in found.items() if key != RATE and steps)
        print(f"{name}, round {number}: {took or 'warm-up'}", flush=True)
    return found


def matrix_rate() -> float:
    """Operations per second of a processor in a large product, by one thread: the best of a few."""
    torch.set_num_threads(1)
    size = 2048
    a, b = torch.randn(size, size), torch.randn(size, size)
    rates = []
    for _ in range(5):
        started = time.process_time()
        a @ b
        rates.append(2 * size**3 / (time.process_time() - started))
    return max(rates)


def step_flops(model: Path, name: str, num_prompt_tokens: int) -> float:
    """Operations of the matrix products of a step, the mean over the rounds: generation, with each prompt read once;
    the reference's pass; training, which is three passes. Logits of response tokens only."""
    shape, counts = shape_of(model), []
    mean_prompt = num_prompt_tokens / work.PROMPTS

    def layers(tokens: float, context: float) -> float:
        return shape.num_layers * layer_flops(shape, tokens, context)

    for number in range(1, ROUNDS + 1):
        lengths = work.lengths_of(name, number)
        whole = sum(layers(mean_prompt + one, (mean_prompt + one) / 2) for one in lengths)
        logits = head_flops(shape, sum(lengths))
        decoded = sum(layers(one - 1, mean_prompt + one / 2) for one in lengths)
        generation = layers(num_prompt_tokens, mean_prompt / 2) + decoded + logits
        counts.append(generation + 4 * (whole + logits))
    return statistics.fmean(counts)


def shape_of(model: Path) -> ModelShape:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return ModelShape(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocab_size=config["vocab_size"],
        tied=config["tie_word_embeddings"],
    )


def row_of(name: str, peer: str, found: Mapping[str, list[dict]], flops: float) -> dict:
    """Medians over the rounds; the ratio is the median of the rounds' ratios, because a slow moment of the machine
    slows neighbours alike."""

    def median(program: str, key: str) -> float:
        return statistics.median(step[key] for step in found[program])

    ratios = [theirs["step_s"] / mine["step_s"] for mine, theirs in zip(found["ours"], found[peer], strict=True)]
    rate, ratio = median(RATE, RATE), statistics.median(ratios)
    floor_s = flops / rate
    tokens = [sum(work.lengths_of(name, number)) for number in range(1, ROUNDS + 1)]
    row = {"model": "SmolLM2-135M", "dtype": "float32", "threads": 1, "work": name, "peer": peer}
    row |= {"responses": work.PROMPTS * work.SAMPLES, "tokens": statistics.fmean(tokens), "rounds": ROUNDS}
    row |= {"ours_s": median("ours", "step_s"), "peer_s": median(peer, "step_s"), "ratios": ratios, "ratio": ratio}
    row |= {"ours_wall_s": median("ours", "wall_s"), "peer_wall_s": median(peer, "wall_s")}
    row |= {f"ours_{phase}_s": median("ours", phase) for phase in PHASES}
    row |= {f"peer_{phase}_s": median(peer, phase) for phase in PHASES}
    row |= {RATE: rate, "flops": flops, "floor_s": floor_s}
    row |= {"ours_share": floor_s / row["ours_s"], "peer_share": floor_s / row["peer_s"]}
    return row | {"promised": LEAST[name][peer], "ok": ratio >= LEAST[name][peer]}


def show(row: Mapping) -> str:
    ours, theirs = (", ".join(f"{phase} {row[f'{who}_{phase}_s']:.1f}" for phase in PHASES) for who in ("ours", "peer"))
    verdict = "" if row["ok"] else f"  BELOW {row['promised']:g}"
    return (
        f"{row['work']}: {row['ratio']:.2f} times as fast as {row['peer']}{verdict}\n"
        f"  ours {row['ours_s']:.1f} s ({ours}), {row['ours_share']:.0%} of it the floor of {row['floor_s']:.1f} s; "
        f"TRL {row['peer_s']:.1f} s ({theirs}), {row['peer_share']:.0%}"
    )
