"""What drawing one iteration ahead gains with real computation: separation on two ranks, one pinned thread each.

PPO of the embedded models with two epochs; every response has the same length, so iterations are alike, and lengths and
batches are such that generation and inference on one rank take about as long as both epochs of training on the other.
Iterations of separation without `ahead`, which decodes the rows of two or of all mini-batches at once, and with it
alternate in the same processes. `simulated_s` is the iteration that simulate() says
for each program from the median seconds of each of its Runs, which wait for no other rank.

Cost: three minutes on two otherwise idle cores. Command: python -m bench ahead-real
"""

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.rows import Arguments, one_world, rows_of_ranks, write
from bench.speed.overlap import Iteration, Runner, seconds_of
from bench.tables import ended
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.simulate import Times, simulate
from rlhf_spmd.plan.program.ahead import draws
from rlhf_spmd.plan.program.instructions import Program, Run
from rlhf_spmd.plan.program.transfers import communicators

NUM_RANKS, EPOCHS = 2, 2
TOKENS = 64  # of every response
SIZES = ("rollout_batch=8", "mini_batch=2", "micro_batch=2", "num_samples=0")
VARIANTS = ({"decode_mini_batches": 2}, {"decode_mini_batches": 4}, {"ahead": 1})  # options of the strategy
ROUNDS, WARM_UP = 9, 2
LEAST_GAIN, LEAST_SHARE = 1.3, 0.9  # of the gain; of the one that simulate gives


def words(tokens: int, more: list[str]) -> list[str]:
    """Returns the options of the run."""
    lengths = [f"generation.max_new_tokens={tokens}", f"generation.min_new_tokens={tokens}"]
    return [*SIZES, *lengths, f"ppo.epochs={EPOCHS}", *more]


def run_case(file: Path, tokens: int, num_rounds: int, more: list[str]) -> None:
    """Runs the case on each rank."""
    rows: list[dict] = []
    with one_world(file, rows) as world:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[world.rank]})
        config = load("tiny", words(tokens, more))
        workload, cluster = make_workload(config), Cluster.parse(f"1x{world.size}")
        programs = [load_strategy("separation").compile(workload, cluster, options) for options in VARIANTS]
        world.start_torch(*communicators(programs), threads=1)
        runners = [Runner(config, program, world) for program in programs]
        rounds = [[runner.iteration(number) for runner in runners] for number in range(WARM_UP + num_rounds)]
        everyone = world.allgather(rounds[WARM_UP:], "the seconds")
        for index, program in enumerate(programs):
            row = row_of(program, [[of_rank[index] for of_rank in one] for one in zip(*everyone, strict=True)])
            rows.append({"bench": "ahead_real", "epochs": EPOCHS, "tokens": tokens} | row)


def row_of(program: Program, rounds: Sequence[Iteration]) -> dict[str, Any]:
    """Returns measured and simulated seconds of an iteration."""
    found: dict[tuple[int, Run], list[float]] = {}
    for one in rounds:
        for run, took_s in seconds_of(program, one).items():
            found.setdefault(run, []).append(took_s)
    run_s = {key: statistics.median(seconds) for key, seconds in found.items()}
    halves = [sum(s for (_, run), s in run_s.items() if draws(program, run) is drawn) for drawn in (True, False)]
    each_s = [max(took_s for took_s, _ in one) for one in rounds]
    return {
        "ahead": program.placement.ahead,
        "decode_mini_batches": None if program.placement.ahead else program.placement.decode_mini_batches,
        "drawing_s": halves[0],
        "training_s": halves[1],
        "simulated_s": simulate(program, Times(lambda rank, run: run_s[rank, run])).makespan_s,
        "measured_s": statistics.median(each_s),
        "seconds": each_s,
    }


def judge(rows: list[dict[str, Any]]) -> bool:
    """Adds to each row without `ahead` what `ahead` gains over it, measured and simulated -> whether the goals are met
    over the fastest of them."""
    *others, ahead = rows
    for row in others:
        row["gain"], row["gain_simulated"] = (row[kind] / ahead[kind] for kind in ("measured_s", "simulated_s"))
    fastest = min(others, key=lambda row: row["measured_s"])
    return fastest["gain"] >= max(LEAST_GAIN, LEAST_SHARE * fastest["gain_simulated"])


def main(arguments: list[str]) -> int:
    parser = Arguments("ahead-real", __doc__)
    parser.add_argument("--on-ranks", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of every response")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of an iteration without and one with it")
    parser.add_argument("--try", action="store_true", dest="tries", help="write no rows")
    parser.add_argument("options", nargs="*", help="KEY=VALUE")
    parsed = parser.parse_args(arguments)
    if parsed.on_ranks:
        run_case(parsed.on_ranks, parsed.tokens, parsed.rounds, parsed.options)
        return 0
    sizes = ["--tokens", str(parsed.tokens), "--rounds", str(parsed.rounds)]
    rows = rows_of_ranks("ahead-real", NUM_RANKS, [*sizes, *parsed.options])
    ok = judge(rows)
    if not parsed.tries:
        write("ahead_real", [row | {"ok": ok} for row in rows])
    return ended("ahead-real", rows, ok=ok)
