"""The cost of fault tolerance: iterations with and without the guards, and with checkpoints.

Guarded iterations are as `train` runs them: flight recorder, positions on the board, the watch thread, a supervisor
beside each rank. Bare ones have none of it: nothing is noted and the supervisors are stopped. Both do the same work
(an iteration of one number has its prompts and random numbers) and take turns, within one world. Then iterations that
begin with a checkpoint, while whose files are written the training goes on, against ones that do not.

Cost: six minutes. Command: python -m bench guards
"""

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.rows import one_world, rows_of_ranks, write
from bench.tables import ended
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import Config, make_workload
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import DEVICE_BYTES, Cluster, Node
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.program.transfers import communicators
from rlhf_spmd.runtime.world.world import World

STRATEGIES = ("flattening", "separation")
NUM_RANKS, NUM_PAIRS, NUM_WARM = 8, 24, 2
MOST_GUARDS, MOST_STALL = 0.02, 0.05  # shares of an iteration


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench guards", description=__doc__)
    parser.add_argument("--on-ranks", type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.on_ranks:
        run_cases(parsed.on_ranks)
        return 0
    rows = rows_of_ranks("guards", NUM_RANKS)
    write("guards", rows)
    return ended("guards", rows)


def run_cases(file: Path) -> None:
    """The main function of each rank."""
    from rlhf_spmd.runtime.guard.supervise import supervised

    rows: list[dict] = []
    with one_world(file, rows, flight=supervised()) as world:
        config = presets.load("tiny", ["num_samples=0"])
        cluster = Cluster((Node(world.size, "cpu", DEVICE_BYTES["cpu"]),))
        programs = {name: load_strategy(name).compile(make_workload(config), cluster, {}) for name in STRATEGIES}
        world.start_torch(*communicators(programs.values()))
        for name, program in programs.items():
            rows.append({"bench": "guards", "strategy": name, "ranks": world.size, **measure(config, program, world)})


def measure(config: Config, program: Program, world: World) -> dict:
    """Shares of an iteration: medians over the pairs, of the slowest rank. The same on every rank."""
    from rlhf_spmd.runtime.checkpoint.saving import Saver
    from rlhf_spmd.runtime.execute.executor import Executor
    from rlhf_spmd.runtime.observe.trace import Tracer
    from rlhf_spmd.runtime.run.prepare import make_iteration, prepare

    job = prepare(config, program, world)
    executor = Executor(job, Tracer(world.rank))

    def iteration(number: int, before: Callable[[], None] = lambda: None) -> tuple[float, float]:
        """Seconds of `before` and of both together, of the slowest rank."""
        data = make_iteration(job, number)
        world.barrier("the start of an iteration")
        began = time.perf_counter()
        before()
        middle = time.perf_counter()
        executor.iteration(data)
        seconds = [middle - began, time.perf_counter() - began]
        return tuple(map(max, zip(*world.allgather(seconds, "the seconds of an iteration"), strict=True)))

    found: dict[str, list[float]] = {name: [] for name in ("bare", "guarded", "stall", "saved", "unsaved")}
    for number in range(NUM_PAIRS + NUM_WARM):
        for guarded in (True, False) if number % 2 else (False, True):
            guard(world, on=guarded)
            found["guarded" if guarded else "bare"].append(iteration(number)[1])
    guard(world, on=True)
    with tempfile.TemporaryDirectory(prefix="guards_") as folder:
        run = Path(world.bcast(folder, what="the folder"))
        saver = Saver(job, run, {"config.json": "{}", "strategy.py": ""})
        for number in range(NUM_PAIRS + NUM_WARM):
            for saves in (True, False) if number % 2 else (False, True):
                if not saves:
                    found["unsaved"].append(iteration(number)[1])
                    continue
                stall_s, both_s = iteration(number, lambda done=number + 1: saver.save(done, {}))
                found["stall"].append(stall_s)
                found["saved"].append(both_s)
                saver.finish()
    found = {name: seconds[NUM_WARM:] for name, seconds in found.items()}
    row = {"iteration_s": statistics.median(found["unsaved"])}
    row |= shares("guards", found["guarded"], found["bare"]) | shares("saving", found["saved"], found["unsaved"])
    row["stall"] = statistics.median(found["stall"]) / row["iteration_s"]
    row["stall_worst"] = max(found["stall"]) / row["iteration_s"]
    return row | {"ok": row["guards"] <= MOST_GUARDS and row["stall"] <= MOST_STALL}


def guard(world: World, *, on: bool) -> None:
    """Turns all guards of this rank on or off."""
    os.kill(os.getppid(), signal.SIGCONT if on else signal.SIGSTOP)  # its supervisor
    for owner, name, nothing in ((world, "progress", lambda *_: None), (world.watch, "_look", lambda: 0.0)):
        if on:
            vars(owner).pop(name, None)  # the class's own method again
        else:
            setattr(owner, name, nothing)


def shares(name: str, with_it: list[float], without: list[float]) -> dict[str, float]:
    """How much longer an iteration takes with something: the median of the pairs, and their quartiles."""
    ratios = [a / b - 1 for a, b in zip(with_it, without, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {name: middle, f"{name}_low": low, f"{name}_high": high}
