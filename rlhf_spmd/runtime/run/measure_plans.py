"""Measures the seconds of an iteration of a program: runs a few on the ranks of this world, without files."""

import gc
import statistics
import time
from collections.abc import Callable

from rlhf_spmd.config import Config
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.runtime.execute.executor import Executor
from rlhf_spmd.runtime.execute.handlers.context import RunState
from rlhf_spmd.runtime.observe.device_clock import clock_of
from rlhf_spmd.runtime.observe.trace import Tracer
from rlhf_spmd.runtime.run.job import make_iteration, prepare
from rlhf_spmd.runtime.world.world import World

LEAST, MOST = 2, 5  # iterations that are counted, behind one that warms up
BUDGET_S = 20.0  # of those: there are no more than LEAST if they take longer


def iteration_s(config: Config, program: Program, world: World) -> float:
    """Median seconds of an iteration, of the slowest rank; the same on every rank. The world must have the program's
    groups. Frees the models before it returns."""
    run, seconds = iterations(config, program, world), []
    run(0)
    while len(seconds) < LEAST or (len(seconds) < MOST and sum(seconds) < BUDGET_S):
        seconds.append(run(1 + len(seconds)))
    del run
    gc.collect()
    return statistics.median(seconds)


def iterations(config: Config, program: Program, world: World) -> Callable[[int], float]:
    """Loads the models of a program. Returns what runs one of its iterations, given the iteration's number, and returns
    the seconds of the slowest rank. The world must have the program's groups."""
    job = prepare(config, program, world)
    executor = Executor(program, world, job.models, job.calls, Tracer(world.rank, clock=clock_of(world.device)))
    state = RunState(config.algorithm.initial_state(config.options))

    def iteration(number: int) -> float:
        data = make_iteration(job, number)
        world.barrier("the start of an iteration")
        began = time.perf_counter()
        executor.iteration(data, state)
        return max(world.allgather(time.perf_counter() - began, "the seconds of an iteration"))

    return iteration
