"""What a lag costs of learning: paired runs on one rank in which only the weights that generate are older.

PPO and GRPO on the embedded problems; responses are drawn with the weights of `lag` iterations ago (the first ones,
until there are so many), under each correction of the policy loss; evaluations use the newest weights. A pair is a run
and that of the same page and seed without a lag. Rows that exist are not measured again, so it may be stopped and
started. Without a warm-up the first iterations move a token's logprob the most,
those of GRPO by 0.04 to 0.15 nats, and by much more where nothing holds the actor near the generator. With half the
rate, which rises over all 80 steps of a run (`--actor-lr 5e-5 --warmup 80`), the most is 0.04 to 0.06.

Cost: 200 runs of 15 s on a thread each. Command: python -m bench lag
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from bench.columns import MEASURE, paired
from bench.rows import Arguments, fill, read_rows, train
from bench.tables import ended

ON_A_RANK = "--on-a-rank"
PAGES, LAGS, SEEDS = ("grpo", "ppo"), (1, 2, 4), (0, 1, 2, 3, 4)
WEIGHTED = ("old_logprobs=recompute", "importance_weights=token")
CORRECTIONS = {  # options of the page
    "behaviour clip": ("old_logprobs=generator",),  # the ratio to the generator is the importance ratio, and clipped
    "uncorrected": ("old_logprobs=recompute",),  # with the newest weights here: that the generator is older is ignored
    "TIS": WEIGHTED,
    "TIS + clip": (*WEIGHTED, "generator_clip=true"),
    "IcePop": (*WEIGHTED, "importance_cap=none", "rejection=token"),
    "decoupled": (*WEIGHTED, "importance_cap=none"),
}
PARTIAL = "behaviour clip, partial rollouts"  # at a lag of 1, with which the newest tokens train
PARTIAL_STEPS = 3  # of sums, of which those above 99 have four tokens
SIZES = {"grpo": ("rollout_batch=32",), "ppo": ("rollout_batch=256",)}  # both 256 responses, in four steps
ACTOR_LR = 1e-4  # a third of the preset's, with which an iteration moves a token's logprob by 0.2 nats
SIZE = ("mini_batch=64", "micro_batch=64", "iterations=20", "eval.every=4")
KEY = ("page", "lag", "correction", "seed")
LIMIT_S = 3600.0


def cases(lags: Sequence[int] = LAGS) -> list[tuple[str, int, str, int]]:
    """Returns page, lag, correction and seed of every run; those of a page are neighbours."""
    lagged = [(0, "behaviour clip"), *product(lags, CORRECTIONS), *((lag, PARTIAL) for lag in lags if lag == 1)]
    return [(page, lag, name, seed) for page in PAGES for lag, name in lagged for seed in SEEDS]


def delay(lag: int) -> None:
    """Makes this process generate with the actor's weights of `lag` iterations ago from now on, and carry responses on
    without sampling ahead."""
    import torch

    from rlhf_spmd.plan.program import compile as compiler
    from rlhf_spmd.runtime.execute.handlers import generate

    compiler.validate = lambda *_: None

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
    options = [f"{page}.{word}" for word in CORRECTIONS.get(case["correction"], CORRECTIONS["behaviour clip"])]
    options += [f"partial_steps={PARTIAL_STEPS}"] * (case["correction"] == PARTIAL)
    with tempfile.TemporaryDirectory() as runs:
        words = ["--preset", "arithmetic", "--algorithm", page, "--runs", runs, f"seed={case['seed']}"]
        words += ["--strategy", "flattening", "parity_tolerance=1e6", *SIZES[page], *SIZE, *options, *overrides]
        words += [f"optimizer.actor_lr={case['actor_lr']}", f"optimizer.warmup_steps={case['warmup']}"]
        told = {"limit_s": LIMIT_S, "environment": os.environ | {"OMP_NUM_THREADS": "1"}}
        result, metrics = train(1, words, within=["bench", "lag", ON_A_RANK, str(case["lag"])], **told)
        evaluations = read_rows(Path(result["run_dir"]) / "evaluations.jsonl")
    nats = [row["parity_mean_abs"] for row in metrics if "parity_mean_abs" in row]
    return {
        "iterations": result["iterations"],
        "accuracy_first": result["eval_mean@1_first"],
        MEASURE: statistics.fmean(row["mean@1"] for row in evaluations[1:]),
        "accuracy_last": result["eval_mean@1_last"],
        "parity_mean_abs": statistics.fmean(nats),
        "parity_mean_abs_largest": max(nats),
        "ess_least": min((row["importance_ess"] for row in metrics if "importance_ess" in row), default=None),
        "wall_s": time.perf_counter() - began,
    }


def main(arguments: list[str]) -> int:
    if arguments[:1] == [ON_A_RANK]:
        from rlhf_spmd.__main__ import main as program

        delay(int(arguments[1]))
        sys.argv[1:] = arguments[2:]
        return program()
    parser = Arguments("lag", __doc__, fills=True)
    parser.add_argument("--actor-lr", type=float, default=ACTOR_LR, metavar="RATE", help="rate of the actor")
    parser.add_argument("--warmup", type=int, default=0, metavar="STEPS", help="steps over which the rates rise")
    parser.add_argument("--lag", type=int, nargs="+", choices=LAGS, default=LAGS, help="only runs of these lags")
    parser.add_argument("--together", type=int, default=2, help="number of runs at a time")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE")
    parsed = parser.parse_args(arguments)
    rates = {"actor_lr": parsed.actor_lr, "warmup": parsed.warmup}
    every = [dict(zip(KEY, case, strict=True)) | rates for case in cases(parsed.lag)]
    rows = fill("lag", every, partial(measured, overrides=parsed.overrides), together=parsed.together)
    return ended("lag", paired(rows), ok=True)
