"""What drawing one iteration ahead gains with real computation: separation on two ranks, one pinned thread each.

PPO of the embedded models with two epochs; every response has the same length, so iterations are alike, and lengths and
batches are such that generation and inference on one rank take about as long as both epochs of training on the other.
Iterations without and with `ahead` alternate in the same processes. `simulated_s` is the iteration that simulate() says
for each program from the median seconds of each of its Runs, which wait for no other rank.

Cost: three minutes on two otherwise idle cores. Command: python -m bench ahead
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.rows import add, on_ranks
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
SIZES = ("rollout_batch=64", "mini_batch=16", "micro_batch=16", "num_samples=0", "eval.prompts=")
ROUNDS, WARM_UP = 9, 2
LEAST_GAIN, LEAST_SHARE = 1.3, 0.9  # of the gain; of the one that simulate gives


def words(tokens: int, more: list[str]) -> list[str]:
    """The options of the run."""
    lengths = [f"generation.max_new_tokens={tokens}", f"generation.min_new_tokens={tokens}"]
    return [*SIZES, *lengths, f"ppo.epochs={EPOCHS}", *more]


class Runner:
    """One program on one rank, with models of its own."""

    def __init__(self, config: Any, program: Program, world: Any):
        from rlhf_spmd.runtime.ahead.steps import AheadExecutor
        from rlhf_spmd.runtime.execute.executor import Executor
        from rlhf_spmd.runtime.observe.trace import Tracer
        from rlhf_spmd.runtime.run.prepare import prepare

        self.program, self.world, self.recorder = program, world, Tracer()
        self.job = prepare(config, program, world)
        self.executor = (AheadExecutor if program.placement.ahead else Executor)(self.job, self.recorder)
        self.in_flight: Any = None

    def iteration(self, number: int) -> tuple[float, list[float]]:
        """Seconds of an iteration, and of each Run of this rank. One ahead, the first one is the prologue."""
        from rlhf_spmd.runtime.ahead.in_flight import Batch
        from rlhf_spmd.runtime.ahead.steps import Batches
        from rlhf_spmd.runtime.run.prepare import make_iteration

        data = make_iteration(self.job, number)
        if self.program.placement.ahead:
            data = Batches(self.in_flight, Batch(data))
            self.in_flight = data.drawn
        else:
            self.executor.begin()
        self.world.barrier("the start of an iteration")
        self.recorder.spans.clear()
        began = time.perf_counter()
        self.executor.iteration(data)
        took_s = time.perf_counter() - began
        return took_s, [span[3] - span[2] for span in self.recorder.spans if span[1] == "compute"]


def run_case(file: Path, tokens: int, more: list[str]) -> None:
    """The main function of each rank; rank 0 writes the rows."""
    from rlhf_spmd.runtime.world.world import World

    world = World.discover()
    try:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[world.rank]})
        world.use_device("cpu")
        config = load("tiny", words(tokens, more))
        workload, cluster = make_workload(config), Cluster.parse(f"1x{world.size}")
        programs = [load_strategy("separation").compile(workload, cluster, {"ahead": ahead}) for ahead in (0, 1)]
        world.start_torch(*communicators(programs), threads=1)
        runners = [Runner(config, program, world) for program in programs]
        rounds = [[runner.iteration(number) for runner in runners] for number in range(WARM_UP + ROUNDS)]
        everyone = world.allgather(rounds[WARM_UP:], "the seconds")
        world.shutdown()
    except BaseException as error:
        world.fail(error)
    if world.rank == 0:
        rows = [
            row_of(program, [[of_rank[index] for of_rank in one] for one in zip(*everyone, strict=True)])
            for index, program in enumerate(programs)
        ]
        about = {"epochs": EPOCHS, "tokens": tokens}
        file.write_text(json.dumps([{"bench": "ahead"} | about | row for row in rows]), encoding="utf-8")


def row_of(program: Program, rounds: list[list[tuple[float, list[float]]]]) -> dict[str, Any]:
    """Measured and simulated seconds. rounds[i][rank]: of an iteration, and of each Run of the rank."""
    found: dict[tuple[int, Run], list[float]] = {}
    for one in rounds:
        for rank, (_, seconds) in enumerate(one):
            runs = [step for step in program.instructions[rank] if isinstance(step, Run)]
            for run, took_s in zip(runs, seconds, strict=True):
                found.setdefault((rank, run), []).append(took_s)
    run_s = {key: statistics.median(seconds) for key, seconds in found.items()}
    halves = [sum(s for (_, run), s in run_s.items() if draws(program, run) is drawn) for drawn in (True, False)]
    each_s = [max(took_s for took_s, _ in one) for one in rounds]
    return {
        "ahead": program.placement.ahead,
        "drawing_s": halves[0],
        "training_s": halves[1],
        "simulated_s": simulate(program, Times(lambda rank, run: run_s[rank, run])).makespan_s,
        "measured_s": statistics.median(each_s),
        "seconds": each_s,
    }


def judge(rows: list[dict[str, Any]]) -> bool:
    """Adds `gain` and `gain_simulated` to the row one ahead -> whether both goals are met."""
    late, ahead = rows
    ahead["gain"] = late["measured_s"] / ahead["measured_s"]
    ahead["gain_simulated"] = late["simulated_s"] / ahead["simulated_s"]
    return ahead["gain"] >= LEAST_GAIN and ahead["gain"] >= LEAST_SHARE * ahead["gain_simulated"]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench ahead", description=__doc__)
    parser.add_argument("--on-ranks", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of every response")
    parser.add_argument("--try", action="store_true", dest="tries", help="write no rows")
    parser.add_argument("options", nargs="*", help="KEY=VALUE")
    parsed = parser.parse_args(arguments)
    if parsed.on_ranks:
        run_case(parsed.on_ranks, parsed.tokens, parsed.options)
        return 0
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "rows.json"
        on_ranks(NUM_RANKS, ["ahead", "--on-ranks", str(file), "--tokens", str(parsed.tokens), *parsed.options])
        rows = json.loads(file.read_text(encoding="utf-8"))
    ok = judge(rows)
    print("ahead  drawing s  training s  simulated s  measured s")
    for row in rows:
        halves = f"{row['drawing_s']:9.3f}  {row['training_s']:10.3f}"
        print(f"{row['ahead']:5}  {halves}  {row['simulated_s']:11.3f}  {row['measured_s']:10.3f}")
    print(f"gain {rows[1]['gain']:.3f}, simulated {rows[1]['gain_simulated']:.3f}")
    if not parsed.tries:
        add("ahead", [row | {"ok": ok} for row in rows])
    print(json.dumps({"bench": "ahead", "ok": ok}))
    return 0 if ok else 1
