"""What a lag costs of learning: paired runs on one rank in which only the weights that generate are older.

PPO and GRPO on the embedded problems; responses are drawn with the weights of `lag` iterations ago (the first ones,
until there are so many), under each correction of the policy loss; evaluations use the newest weights. A pair is a run
and that of the same page and seed without a lag, which has no correction. Rows that exist are not measured again, so
it may be stopped and started; `--most N` measures so many and stops.

Cost: 130 runs, two at a time with one thread each. Command: python -m bench lag
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

from bench.ahead_tables import MEASURE, paired
from bench.rows import RESULTS, fill, read_rows, train

ON_A_RANK = "--on-a-rank"
PAGES, LAGS, SEEDS = ("grpo", "ppo"), (1, 2, 4), (0, 1, 2, 3, 4)
WEIGHTED = ("old_logprobs=recompute", "importance_weights=token")
CORRECTIONS = {  # options of the page
    "none": ("old_logprobs=generator",),  # ratios against the generator are clipped
    "TIS": WEIGHTED,
    "IcePop": (*WEIGHTED, "importance_cap=none", "rejection=token"),
    "decoupled": (*WEIGHTED, "importance_cap=none"),
}
SIZES = {"grpo": ("rollout_batch=32",), "ppo": ("rollout_batch=256",)}  # both 256 responses, in four steps
ACTOR_LR = 1e-4  # a third of the preset's, with which an iteration moves a token's logprob by 0.2 nats; with this, 0.03
SIZE = ("mini_batch=64", "micro_batch=64", "iterations=20", "eval.every=4", f"optimizer.actor_lr={ACTOR_LR}")
KEY = ("page", "seed", "lag", "correction")
LIMIT_S = 3600.0


def cases() -> list[tuple[str, int, int, str]]:
    """Returns page, seed, lag and correction of every run; those of a page are neighbours."""
    lagged = [(0, "none"), *product(LAGS, CORRECTIONS)]
    return [(page, seed, lag, name) for page in PAGES for seed in SEEDS for lag, name in lagged]


def delay(lag: int) -> None:
    """Makes this process generate with the actor's weights of `lag` iterations ago from now on."""
    import torch

    from rlhf_spmd.runtime.execute.handlers import generate

    real, before = generate.generate, {}

    def delayed(job: Any, call: Any, run: Any, data: Any) -> None:
        if data.what.startswith("evaluation"):
            return real(job, call, run, data)
        weights = dict(job.models.engines[call.model].model.named_parameters())
        now = {name: p.detach().clone() for name, p in weights.items()}
        before.setdefault(data.number, now)
        before.pop(data.number - lag - 1, None)
        with torch.no_grad():
            for name, p in weights.items():
                p.copy_(before[max(data.number - lag, 0)][name])
            real(job, call, run, data)
            for name, p in weights.items():
                p.copy_(now[name])

    generate.generate = delayed


def measured(case: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Returns the row of one run."""
    page, began = case["page"], time.perf_counter()
    options = [f"{page}.{word}" for word in CORRECTIONS[case["correction"]]]
    with tempfile.TemporaryDirectory() as runs:
        words = ["--preset", "arithmetic", "--algorithm", page, "--runs", runs, f"seed={case['seed']}"]
        words += ["--strategy", "flattening", "parity_tolerance=1e6", *SIZES[page], *SIZE, *options, *overrides]
        told = {"limit_s": LIMIT_S, "environment": os.environ | {"OMP_NUM_THREADS": "1"}}
        result, metrics = train(1, words, within=["bench", "lag", ON_A_RANK, str(case["lag"])], **told)
        evaluations = read_rows(Path(result["run_dir"]) / "evaluations.jsonl")
    return {
        "actor_lr": ACTOR_LR,
        "iterations": result["iterations"],
        "accuracy_first": result["eval_mean@1_first"],
        MEASURE: statistics.fmean(row["mean@1"] for row in evaluations[1:]),
        "accuracy_last": result["eval_mean@1_last"],
        "parity_mean_abs": statistics.fmean(row["parity_mean_abs"] for row in metrics),
        "ess_least": min((row["importance_ess"] for row in metrics if "importance_ess" in row), default=None),
        "wall_s": time.perf_counter() - began,
    }


def main(arguments: list[str]) -> int:
    if arguments[:1] == [ON_A_RANK]:
        from rlhf_spmd.__main__ import main as program

        delay(int(arguments[1]))
        sys.argv[1:] = arguments[2:]
        return program()
    parser = argparse.ArgumentParser(prog="bench lag", description=__doc__)
    parser.add_argument("--most", type=int, help="number of rows to measure now")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE")
    parsed = parser.parse_args(arguments)
    path, every = RESULTS / "lag.jsonl", [dict(zip(KEY, case, strict=True)) for case in cases()]
    have = [{name: row[name] for name in KEY} for row in (read_rows(path) if path.exists() else [])]
    now = islice((case for case in every if case not in have), parsed.most)
    rows = fill("lag", now, partial(measured, overrides=parsed.overrides), together=2)
    for one in paired(rows):
        words = f"{one['page']} lag {one['lag']} {one['correction']}, {one['seeds']} seeds"
        print(f"{words}: {one['difference']:+.3f} +- {one['half']:.3f}")
    print(json.dumps({"bench": "lag", "rows": len(rows), "of": len(every), "ok": len(rows) == len(every)}))
    return 0
