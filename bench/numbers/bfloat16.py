"""Do reward curves in bfloat16, whose rounding lets tokens differ between placements, agree within noise?

Ten iterations of the embedded model with each algorithm, under flattening, interleaving and separation on four ranks
against one rank. Noise is the standard error of the difference of two means over independent responses to the same
prompts.

Cost: four minutes on two cores for PPO, six for the others. Command: python -m bench bfloat16 [ALGORITHM ...]
"""

import argparse
import json
import math
import tempfile
from collections.abc import Mapping, Sequence

from bench.rows import RESULTS, read_rows, train, write

LIMIT = 1.35  # standard errors: 95% of independent pairs of ten-iteration curves lie closer
PPO = ((1, "flattening"), (4, "flattening"), (4, "interleaving1"), (4, "interleaving2"), (4, "separation"))
OTHERS = ((1, "flattening"), (4, "interleaving2"), (4, "separation"))
CASES = {"ppo": PPO} | dict.fromkeys(("grpo", "rloo", "remax", "reinforce_plus_plus"), OTHERS)
OPTIONS = ["dtype=bfloat16", "iterations=10", "num_samples=0"]
WORDS = {"grpo": ["grpo.kl_coef=0.04"]}  # with a reference, so that interleaving applies
NUM_RESPONSES = 128  # per iteration of the preset


def in_standard_errors(mine: Sequence[Mapping], expected: Sequence[Mapping], num_responses: int) -> float:
    """Root mean square over the iterations of the difference of mean rewards, in standard errors of that difference."""
    squares = [
        (a["reward"] - b["reward"]) ** 2 / ((a["reward_std"] ** 2 + b["reward_std"] ** 2) / num_responses)
        for a, b in zip(mine, expected, strict=True)
    ]
    return math.sqrt(sum(squares) / len(squares))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench bfloat16", description=__doc__)
    parser.add_argument("algorithms", nargs="*", metavar="ALGORITHM", help="measured anew; none: all")
    algorithms = parser.parse_args(arguments).algorithms or list(CASES)
    if unknown := set(algorithms) - set(CASES):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(CASES)}")
    print("algorithm            ranks  strategy        reward first   last  difference in standard errors  largest")
    with tempfile.TemporaryDirectory() as runs:
        rows = [row for name in algorithms for row in measured(name, runs)]
    kept = [row for row in read_rows(RESULTS / "bfloat16.jsonl") if row["algorithm"] not in algorithms]
    write("bfloat16", sorted(kept + rows, key=lambda row: list(CASES).index(row["algorithm"])))
    ok = all(row["ok"] for row in rows)
    print(json.dumps({"bench": "bfloat16", "ok": ok}))
    return 0 if ok else 1


def measured(algorithm: str, runs: str) -> list[dict]:
    """The rows of an algorithm: its first case is the one that the others are compared with."""
    rows, base = [], []
    for ranks, name in CASES[algorithm]:
        words = ["--algorithm", algorithm, *OPTIONS, *WORDS.get(algorithm, [])]
        result, metrics = train(ranks, ["--runs", runs, "--strategy", name, *words])
        base = base or metrics
        row = {
            "bench": "bfloat16",
            "algorithm": algorithm,
            "ranks": ranks,
            "strategy": name,
            "rewards": [m["reward"] for m in metrics],
            "same_tokens": sum(m["tokens_sha256"] == b["tokens_sha256"] for m, b in zip(metrics, base, strict=True)),
            "difference": in_standard_errors(metrics, base, NUM_RESPONSES),
            "largest": max(in_standard_errors([m], [b], NUM_RESPONSES) for m, b in zip(metrics, base, strict=True)),
            "parity_max_abs": result["parity_max_abs"],
        }
        row["ok"] = row["difference"] <= LIMIT
        rows.append(row)
        curve = f"{row['rewards'][0]:+12.3f} {row['rewards'][-1]:+6.3f}"
        found = f"{curve}  {row['difference']:29.2f}  {row['largest']:7.2f}"
        print(f"{algorithm:<19}  {ranks:5}  {name:<14}  {found}", flush=True)
    return rows
