"""Iterations without files and console, to measure their seconds."""

import gc
import statistics
import time
from collections.abc import Callable

from rlhf_spmd.config.options import Config
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.runtime.execute.executor import Executor
from rlhf_spmd.runtime.observe.device_clock import clock_of
from rlhf_spmd.runtime.observe.trace import Tracer
from rlhf_spmd.runtime.run.prepare import make_iteration, prepare
from rlhf_spmd.runtime.world.world import World

COUNTED = 3  # measured iterations, after one that warms up; the same for all plans, because responses differ in length


def iteration_s(config: Config, program: Program, world: World) -> float:
    """Median seconds of an iteration, of the slowest rank; the same on every rank. The world must have the program's
    groups. Frees the models before it returns."""
    run = iteration_runner(config, program, world)
    seconds = [run(number) for number in range(1 + COUNTED)][1:]
    del run
    gc.collect()
    return statistics.median(seconds)


def iteration_runner(config: Config, program: Program, world: World) -> Callable[[int], float]:
    """Loads the models of a program. Returns a function that runs the iteration with the given number, from 0,
    and returns the seconds of the slowest rank. The world must have the program's groups."""
    job = prepare(config, program, world)
    executor = Executor(job, Tracer(world.rank, clock=clock_of(world.device)))

    def iteration(number: int) -> float:
        data = make_iteration(job, number)
        world.barrier("the start of an iteration")
        began = time.perf_counter()
        executor.iteration(data)
        return max(world.allgather(time.perf_counter() - began, "the seconds of an iteration"))

    return iteration
