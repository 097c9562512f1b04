"""The stages of alignment on the embedded models: SFT, a reward model, PPO against it, and DPO from the same pairs.

Purpose: `make demo-pipeline`. A base model that writes poorly becomes one that writes well, and then pleasantly. Each
         command is printed as a user types it; at the end stand a table with each stage's measure on held-out data
         before and after, and one page with the curves of all stages (`report`).
Cost:    two minutes on two cores, 160 seconds of a processor
Command: python -m tools demo-pipeline [--runs FOLDER] [--ranks 2] [--record]
         --record: also write the measures into bench/results/pipeline.jsonl
"""

import argparse
import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.rows import RESULTS, write
from bench.tables import text_table
from rlhf_spmd import embedded
from rlhf_spmd.model.hf import load_model, load_tokenizer
from tools.embedded import grammar, stages
from tools.embedded.responses import continuations
from tools.embedded.scoring import encode, pad_rows, score_rows

GRAMMAR = "tools/embedded/grammar.py:valence"
SHARES = ("whole texts", "pairs ranked right")  # measures that are shares
SEED, SAMPLES = 7, 2  # of the responses that are measured, to each held-out prompt


COSINE = ("optimizer.schedule=cosine", "optimizer.warmup_steps=10")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the runs; tests have smaller ones."""

    sft: tuple[str, ...] = ("iterations=40", "eval.every=10")
    samples: tuple[str, ...] = ("samples_per_prompt=12",)
    reward_model: tuple[str, ...] = ("iterations=30", "eval.every=10", "optimizer.reward_lr=2e-3", *COSINE)
    ppo: tuple[str, ...] = ("iterations=15", "eval.every=5")
    dpo: tuple[str, ...] = ("iterations=20", "eval.every=5")


def commands(runs: Path, ranks: int, sizes: Sizes) -> dict[str, list[str]]:
    """Returns the words of each command, by stage."""
    mpirun = ["mpirun", "-n", str(ranks), "python", "-m", "rlhf_spmd"]
    train = [*mpirun, "train", "--runs", str(runs), "--name"]
    data = Path(embedded.path_of("prompts.jsonl")).parent.relative_to(stages.REPOSITORY)
    pairs = [f"data.prompts={runs}/pairs.jsonl", f"eval.prompts={runs}/pairs_held_out.jsonl"]
    sft, reward = f"{runs}/sft/actor", f"{runs}/rm/reward"
    scored = [f"eval.prompts={data}/held_out.jsonl", f"eval.reward_function={GRAMMAR}"]
    return {
        "sft": [*train, "sft", "--algorithm", "sft", *sizes.sft],
        "samples": [*mpirun, "generate", "--model", sft, "--prompts", f"{data}/prompts.jsonl"]
        + ["--out", f"{runs}/samples.jsonl", *sizes.samples, "generation.max_new_tokens=24"],
        "pairs": ["python", "-m", "tools", "rank-pairs", f"{runs}/samples.jsonl"]
        + ["--out", f"{runs}/pairs.jsonl", "--held-out", f"{runs}/pairs_held_out.jsonl"],
        "reward model": [*train, "rm", "--algorithm", "reward_model", f"models.reward={sft}", *pairs]
        + ["reward_model.foresight_coef=0.1", *sizes.reward_model],
        "ppo": [*train, "ppo", f"models.actor={sft}", f"models.reward={reward}", "ppo.normalize_scores=true"]
        + [*scored, *sizes.ppo],
        "dpo": [*train, "dpo", "--algorithm", "dpo", f"models.actor={sft}", *pairs, *sizes.dpo],
        "page": ["python", "-m", "rlhf_spmd", "report", *(f"{runs}/{name}" for name in ("sft", "rm", "ppo", "dpo"))]
        + ["--out", f"{runs}/report.html", "--title", "The stages of alignment"],
    }


@torch.no_grad()
def responses_of(folder: Path, reward: Path) -> dict[str, float]:
    """Measures of a model's responses to held-out prompts: the mean score of the grammar and of a reward model, and the
    share of whole texts."""
    tokenizer, prompts = load_tokenizer(folder), [row["prompt"] for row in stages.read_rows(held_out())] * SAMPLES
    samples = continuations(load_model(folder, head="lm"), tokenizer, prompts, SEED, max_new_tokens=24)
    texts = [text for text, _ in samples]
    rows = [encode(tokenizer, prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    scores_B = score_rows(load_model(reward, head="scalar"), pad_rows(rows))
    return {
        "grammar": sum(map(grammar.score, texts)) / len(texts),
        "reward model": scores_B.mean().item(),
        "whole": sum(map(grammar.is_whole, texts)) / len(texts),
    }


def held_out() -> Path:
    return Path(embedded.path_of("held_out.jsonl"))


def measured(runs: Path) -> list[dict]:
    """Returns a row for each measure of each stage: before and after it, on held-out data."""
    found = []
    for stage, run, names in (
        ("SFT", "sft", {"loss": "nats per token"}),
        ("reward model", "rm", {"accuracy": "pairs ranked right"}),
        ("DPO", "dpo", {"accuracy": "pairs ranked right"}),
    ):
        rows = stages.read_rows(stages.REPOSITORY / runs / run / "evaluations.jsonl")
        found += [row_of(stage, what, rows[0][name], rows[-1][name]) for name, what in names.items()]
    folders = {"base": Path(embedded.path_of("base")), "SFT": stages.REPOSITORY / runs / "sft" / "actor"}
    folders |= {stage: stages.REPOSITORY / runs / stage.lower() / "actor" for stage in ("PPO", "DPO")}
    reward = stages.REPOSITORY / runs / "rm" / "reward"
    of = {name: responses_of(folder, reward) for name, folder in folders.items()}
    for stage, before in (("SFT", "base"), ("PPO", "SFT"), ("DPO", "SFT")):
        found.append(row_of(stage, "whole texts", of[before]["whole"], of[stage]["whole"]))
        if stage != "SFT":
            found.append(row_of(stage, "score by the grammar", of[before]["grammar"], of[stage]["grammar"]))
            found.append(
                row_of(stage, "score by the reward model", of[before]["reward model"], of[stage]["reward model"])
            )
    order = ("SFT", "reward model", "PPO", "DPO")
    return sorted(found, key=lambda row: order.index(row["stage"]))


def row_of(stage: str, measure: str, before: float, after: float) -> dict:
    values = {"stage": stage, "measure": measure, "before": before, "after": after}
    return {"bench": "demo-pipeline"} | values | {"is_share": measure in SHARES}


def demo(runs: Path, ranks: int, sizes: Sizes) -> list[dict]:
    """Runs all stages -> the rows of the table. runs: a folder that does not exist yet, seen from the repository."""
    (stages.REPOSITORY / runs).mkdir(parents=True)
    seconds = {}
    for stage, words in commands(runs, ranks, sizes).items():
        print(f"\n$ {shlex.join(words)}", flush=True)
        began = time.perf_counter()
        stages.run(words)
        seconds[stage] = time.perf_counter() - began
    torch.set_num_threads(1)  # the models are tiny
    rows = measured(runs)
    for row in rows:
        row |= {"ranks": ranks, "seconds": sum(seconds.values()), "ok": True}
    print("\n" + ", ".join(f"{stage} {taken:.0f} s" for stage, taken in seconds.items()))
    return rows


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools demo-pipeline", description=__doc__.partition("\n")[0])
    default = Path("runs") / time.strftime("pipeline-%Y%m%d-%H%M%S")
    parser.add_argument("--runs", type=Path, default=default, help="a new folder for all runs (default: by the time)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--record", action="store_true", help="write the measures into bench/results/pipeline.jsonl")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    rows = demo(options.runs, options.ranks, Sizes())
    if options.record:
        write("pipeline", rows, RESULTS)
    print(text_table("pipeline", rows))
    print(f"{options.runs}/report.html has the curves of all stages")
    result = {"bench": "demo-pipeline", "runs": str(options.runs), "seconds": time.perf_counter() - began, "ok": True}
    print(json.dumps(result))
    return 0
