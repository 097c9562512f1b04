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

import json
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

from bench.rows import ABOUT, OUTPUT, Arguments, keep, provenance, read_rows, rows_so_far, write, written
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
OPTIONS = ["mini_batch=16", "generation.max_new_tokens=12", "num_samples=2", f"iterations={ITERATIONS}"]
OPTIONS += ["checkpoint.every=1", "deadline_s=30"]
EVALUATED = [f"eval.prompts={embedded.path_of('prompts.jsonl')}", "eval.num_prompts=8", "eval.every=3"]
EVALUATED += ["checkpoint.best=mean@1"]
WORDS = {
    "ppo": ["rollout_batch=32", "ppo.epochs=2", "ppo.kl_controller=adaptive"],
    "grpo": ["rollout_batch=8", "samples_per_prompt=4", "grpo.epochs=2", "grpo.oversampling=2", *EVALUATED],
    "remax": ["rollout_batch=32", "remax.epochs=2", *EVALUATED],
}
WORDS["grpo"] += ["grpo.drop_equal_groups=true", "rollouts.every=1"]
TOOLS = "grpo with tools"
WORDS[TOOLS] = ["--preset", "tools", "rollout_batch=8", "samples_per_prompt=4", "grpo.epochs=2", "eval.num_prompts=8"]
WORDS[TOOLS] += ["eval.every=3", "generation.max_new_tokens=64", "environment_workers=2"]
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
MIXTURE = "grpo with a mixture"
WORDS[MIXTURE] = ["--preset", "arithmetic", "--model", str(embedded.path_of("mixture/actor")), "rollout_batch=8"]
WORDS[MIXTURE] += ["samples_per_prompt=4", "grpo.epochs=2", "experts.balance_coef=0.01"]
ADAPTERS = "ppo with adapters"
WORDS[ADAPTERS] = [*WORDS["ppo"], "lora.rank=4", "lora.targets=q_proj,v_proj,down_proj"]
AHEAD = "ppo one iteration ahead"
TWO_TYPES = """[[nodes]]
devices = 2
device = "cpu"
[[nodes]]
devices = 2
device = "other-cpu"
[types.other-cpu]
"""  # a cluster file: one machine stands in for two nodes
WORDS[AHEAD] = [*WORDS["ppo"], "strategy.ahead=1", "rollouts.every=1"]
WORDS[AHEAD] += ["ppo.old_logprobs=current", "ppo.importance_weights=token"]
CHAIN = "ppo with overlapping iterations"
WORDS[CHAIN] = [*WORDS["ppo"], "strategy.chain=true", "checkpoint.every=4"]
CASES = {"ppo": STRATEGIES, "grpo": ("flattening", "separation", "reallocation"), "remax": ("separation",)}
CASES[ADAPTERS] = ("flattening", "separation", "reallocation")
CASES[AHEAD] = CASES[CHAIN] = ("separation",)
CASES[TOOLS] = ("flattening", "separation")
CASES[MIXTURE] = ("flattening", "separation", "reallocation")


def main(arguments: list[str]) -> int:
    parser = Arguments("faults", __doc__, fills=True)
    parser.add_argument("--quick", action="store_true", help=f"{NUM_QUICK} kills per strategy, kept out of the results")
    parser.add_argument("algorithms", nargs="*", metavar="ALGORITHM", help=f"{', '.join(CASES)}; none: all")
    parser.add_argument("--runs", type=int, default=0, help="of each case; 0: as many as the results have")
    parsed = parser.parse_args(arguments)
    quick = parsed.quick
    if unknown := set(parsed.algorithms) - set(CASES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(CASES)}")
    with tempfile.TemporaryDirectory(prefix="faults_") as folder:
        points = Path(folder) / "points.jsonl" if quick else written("fault_points")
        chosen = parsed.algorithms or [*CASES]
        if OUTPUT.again and not quick:
            write("fault_points", [row for row in rows_so_far("fault_points") if row["algorithm"] not in chosen])
        cases = [(algorithm, strategy) for algorithm in CASES for strategy in CASES[algorithm] if algorithm in chosen]
        for algorithm, strategy in cases:
            num_runs = NUM_RUNS if algorithm in ("ppo", AHEAD, CHAIN) else NUM_RUNS_OF_OTHERS
            num_runs, num_kills = (1, NUM_QUICK) if quick else (parsed.runs or num_runs, NUM_KILLS)
            measure(algorithm, strategy, num_runs, num_kills, points, Path(folder))
        rows = [summary(*case, read_rows(points)) for case in cases]
    if not quick:
        keep("faults", rows, ("algorithm", "strategy"), lambda row: [*CASES].index(row["algorithm"]))
    totals = {name: sum(row[name] for row in rows) for name in ("points", "equal", "hangs", "orphans", "named")}
    return ended("faults", rows, **totals)


def measure(algorithm: str, strategy: str, num_runs: int, num_kills: int, points: Path, folder: Path) -> None:
    """Adds the missing runs of an algorithm under a strategy."""
    found = read_rows(points) if points.exists() else []
    done = {row["run"] for row in found if (row["algorithm"], row["strategy"]) == (algorithm, strategy)}
    options = ["--algorithm", algorithm.partition(" ")[0], *OPTIONS, *WORDS[algorithm]]
    options += [*strategy_words(strategy, folder), *environment_words(algorithm, folder)]
    name = f"{algorithm.replace(' ', '_')}-{strategy}"
    expected, iteration_s = None, 0.0
    for run in sorted(set(range(num_runs)) - done):
        if expected is None:
            alone = Started(NUM_RANKS, folder / name, *options)
            status, stderr = alone.end()
            assert status == 0, stderr
            expected, iteration_s = outcome(alone.folder), slowest_s(alone.folder)
        seed = f"{name} {run}" if algorithm != "ppo" else f"{strategy} {run}"  # as before there were others
        rows = killed(options, folder / f"{name}-{run}", expected, iteration_s, num_kills, seed)
        about = {"bench": "faults", "algorithm": algorithm, "strategy": strategy, "run": run}
        points.parent.mkdir(parents=True, exist_ok=True)
        with points.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(about | row | provenance()) + "\n" for row in rows))
        names = ("rank", "iterations", "end_s", "equal", "hang", "orphans", "named")
        for row in rows:
            print(f"{name} {run}: " + ", ".join(f"{key} {row[key]}" for key in names), flush=True)


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
    return [row | {"equal": equal, "why_not": why_not} for row in rows]


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
