"""Kills at random moments: does a resumed run end with the same bits, is the dead rank named, does anything hang, is a
process left behind?

A run on four ranks is killed four times: each time a random rank gets SIGKILL at a random moment, the first time in the
first quarter of the iterations, the last time in the last, and the run is resumed. What it leaves in the end (metrics
but for times, weights, moments, responses) is compared byte by byte with an undisturbed run: one kill that spoils it
spoils all four. Rows are added as they come: an interrupted bench goes on where it was.

PPO runs under every strategy and a plan of `auto`; the other algorithms run with an evaluation set, whose rows and best
checkpoint are compared, too. PPO also trains adapters (LoRA), draws one iteration ahead, and has iterations that
overlap, with a checkpoint after every fourth one. GRPO also has several turns with tools that take a random time, so
that most kills fall into calls.

Cost: half a minute for four kills on an idle machine, so 45 with --quick are eight minutes and all 1,180 two and a half
hours.
Command: python -m bench faults [--quick] [ALGORITHM ...]
"""

import os
import random
import shutil
import signal
import tempfile
import time
from functools import cache, partial
from pathlib import Path

from bench.rows import ABOUT, OUTPUT, Arguments, fill, keep
from bench.tables import ended
from rlhf_spmd import embedded
from tests.started import Started, num_iterations, outcome, slowest_s

STRATEGIES = ("flattening", "interleaving1", "interleaving2", "separation", "reallocation", "heterogeneous", "auto")
NUM_RANKS, NUM_KILLS = 4, 4  # kills of one run
NUM_RUNS = 25  # of a strategy with PPO, also ahead and in a chain
NUM_RUNS_OF_OTHERS = 5  # with another algorithm or adapters
NUM_QUICK = 3  # kills of a strategy with --quick, of one run
DEADLINE_S = 60.0  # of a job of which a rank is dead
ITERATIONS = 8  # a multiple of NUM_KILLS
OPTIONS = [
    *("mini_batch=16", "generation.max_new_tokens=12", "num_samples=2", f"iterations={ITERATIONS}"),
    *("checkpoint.every=1", "deadline_s=30"),
]
EVALUATED = [
    *(f"eval.prompts={embedded.path_of('prompts.jsonl')}", "eval.num_prompts=8", "eval.every=3"),
    "checkpoint.best=mean@1",
]
TOOLS, MIXTURE, ADAPTERS = "grpo with tools", "grpo with a mixture", "ppo with adapters"
AHEAD, CHAIN = "ppo one iteration ahead", "ppo with overlapping iterations"
PPO = ["rollout_batch=32", "ppo.epochs=2", "ppo.kl_controller=adaptive"]
GRPO = ["rollout_batch=8", "samples_per_prompt=4", "grpo.epochs=2"]
WORDS = {
    "ppo": PPO,
    "grpo": [*GRPO, "grpo.oversampling=2", *EVALUATED, "grpo.drop_equal_groups=true", "rollouts.every=1"],
    "remax": ["rollout_batch=32", "remax.epochs=2", *EVALUATED],
    ADAPTERS: [*PPO, "lora.rank=4", "lora.targets=q_proj,v_proj,down_proj"],
    AHEAD: [
        *(*PPO, "strategy.ahead=1", "rollouts.every=1"),
        *("ppo.old_logprobs=current", "ppo.importance_weights=token"),
    ],
    CHAIN: [*PPO, "strategy.chain=true", "checkpoint.every=4"],
    TOOLS: [
        *("--preset", "tools", *GRPO, "eval.num_prompts=8", "eval.every=3"),
        *("generation.max_new_tokens=64", "environment_workers=2"),
    ],
    MIXTURE: [
        *("--preset", "arithmetic", "--model", str(embedded.path_of("mixture/actor"))),
        *(*GRPO, "experts.balance_coef=0.01"),
    ],
}
CASES = {
    "ppo": STRATEGIES,
    "grpo": ("flattening", "separation", "reallocation"),
    "remax": ("separation",),
    ADAPTERS: ("flattening", "separation", "reallocation"),
    AHEAD: ("separation",),
    CHAIN: ("separation",),
    TOOLS: ("flattening", "separation"),
    MIXTURE: ("flattening", "separation", "reallocation"),
}
SLOW = """
import functools, random, time
from rlhf_spmd.embedded.table_tools import Table

def slow(method):
    @functools.wraps(method)
    def called(*args, **kwargs):
        time.sleep(0.05 * random.random())
        return method(*args, **kwargs)
    return called

class Slow(Table):
    lookup, calculate = slow(Table.lookup), slow(Table.calculate)
"""
TWO_TYPES = """[[nodes]]
devices = 2
device = "cpu"
[[nodes]]
devices = 2
device = "other-cpu"
[types.other-cpu]
"""  # a cluster file: one machine stands in for two nodes


def main(arguments: list[str]) -> int:
    parser = Arguments("faults", __doc__, fills=True)
    parser.add_argument("--quick", action="store_true", help=f"{NUM_QUICK} kills per strategy, kept out of the results")
    parser.add_some("algorithms", CASES, "ALGORITHM")
    parsed, rows = parser.parse_args(arguments), []
    with tempfile.TemporaryDirectory(prefix="faults_") as folder:
        if parsed.quick:
            OUTPUT.folder = Path(folder)
        for algorithm, strategy in [(one, name) for one in CASES if one in parsed.algorithms for name in CASES[one]]:
            num_runs = NUM_RUNS if algorithm in ("ppo", AHEAD, CHAIN) else NUM_RUNS_OF_OTHERS
            num_runs, num_kills = (1, NUM_QUICK) if parsed.quick else (num_runs, NUM_KILLS)
            cases = [{"algorithm": algorithm, "strategy": strategy, "run": run} for run in range(num_runs)]
            points = fill("fault_points", cases, partial(measured, folder=Path(folder), num_kills=num_kills))
            rows.append(summary(algorithm, strategy, points))
    if not parsed.quick:
        keep("faults", rows, ("algorithm", "strategy"), lambda row: [*CASES].index(row["algorithm"]))
    totals = {name: sum(row[name] for row in rows) for name in ("points", "equal", "hangs", "orphans", "named")}
    return ended("faults", rows, **totals)


def measured(case: dict, folder: Path, num_kills: int) -> list[dict]:
    """Returns the rows of a run, one for each kill."""
    algorithm, strategy, run = case.values()
    name = f"{algorithm.replace(' ', '_')}-{strategy}"
    options, expected, iteration_s = undisturbed(algorithm, strategy, folder / name)
    seed = f"{name} {run}" if algorithm != "ppo" else f"{strategy} {run}"  # as before there were others
    return killed(options, folder / f"{name}-{run}", expected, iteration_s, num_kills, seed)


@cache
def undisturbed(algorithm: str, strategy: str, folder: Path) -> tuple[list[str], dict, float]:
    """Runs an algorithm under a strategy without kills -> its options, what it leaves, its slowest iteration."""
    options = ["--algorithm", algorithm.partition(" ")[0], *OPTIONS, *WORDS[algorithm]]
    options += [*strategy_words(strategy, folder.parent), *environment_words(algorithm, folder.parent)]
    alone = Started(NUM_RANKS, folder, *options)
    status, stderr = alone.end()
    assert status == 0, stderr
    return options, outcome(folder), slowest_s(folder)


def strategy_words(strategy: str, folder: Path) -> list[str]:
    """Returns the options that choose a strategy and, if it needs one, its cluster (a file in the folder)."""
    if strategy != "heterogeneous":
        return ["--strategy", strategy]
    (folder / "cluster.toml").write_text(TWO_TYPES, encoding="utf-8")
    return ["--strategy", strategy, "--cluster", str(folder / "cluster.toml")]


def environment_words(algorithm: str, folder: Path) -> list[str]:
    """Returns the option for tools that take their time (a file in the folder), if there are any."""
    if algorithm != TOOLS:
        return []
    (folder / "slow.py").write_text(SLOW, encoding="utf-8")
    return [f"environment={folder / 'slow.py'}:Slow"]


def killed(
    options: list[str], folder: Path, expected: dict, iteration_s: float, num_kills: int, seed: str
) -> list[dict]:
    """Kills a run so many times, looks after it, resumes it each time and compares it in the end: a row per kill."""
    dice, rows = random.Random(seed), []
    started, part = Started(NUM_RANKS, folder, *options), ITERATIONS // num_kills
    for kill in range(num_kills):
        started.wait_for(kill * part + dice.randrange(part))
        time.sleep(dice.uniform(0, iteration_s))
        ranks = started.ranks()
        pid = dice.choice(sorted(ranks)) if ranks else None
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        status, stderr = started.end(limit_s=DEADLINE_S)
        row = {"kill": kill, "rank": ranks.get(pid), "iterations": num_iterations(folder)}
        row |= {"end_s": time.monotonic() - began, "hang": status is None, "orphans": started.num_left()}
        rows.append(row | {"named": f"rank {ranks.get(pid)} of" in stderr})
        started = Started(NUM_RANKS, folder, "--resume")
    status, stderr = started.end()
    equal = status == 0 and outcome(folder) == expected
    rows[-1]["hang"] |= status is None
    rows[-1]["orphans"] += started.num_left()
    why_not = stderr[-500:] if status else ""
    shutil.rmtree(folder)
    return [{"bench": "faults"} | row | {"equal": equal, "why_not": why_not} for row in rows]


def summary(algorithm: str, strategy: str, points: list[dict]) -> dict:
    """Returns the row of an algorithm under a strategy."""
    mine = [row for row in points if (row["algorithm"], row["strategy"]) == (algorithm, strategy)]
    found = {name: sum(row[name] for row in mine) for name in ("equal", "orphans", "named")}
    found |= {"hangs": sum(row["hang"] for row in mine), "slowest_end_s": max(row["end_s"] for row in mine)}
    found["killed"] = sum(row["rank"] is not None for row in mine)  # the others had ended before
    ok = found["equal"] == len(mine) and found["named"] == found["killed"]
    ok = ok and not found["hangs"] and not found["orphans"]
    about = {name: mine[-1][name] for name in ABOUT if name in mine[-1]}  # a bench that went on may have new ones
    case = {"bench": "faults", "algorithm": algorithm, "strategy": strategy, "ranks": NUM_RANKS}
    return case | {"points": len(mine), **found, "ok": ok} | about
