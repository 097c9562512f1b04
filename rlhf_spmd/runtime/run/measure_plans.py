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

NUM_ITERATIONS = 3  # the first one warms up and is not counted


def iteration_s(config: Config, program: Program, world: World) -> float:
    """Median seconds of an iteration, of the slowest rank; the same on every rank. The world must have the program's
    groups. Frees the models before it returns."""
    run = iterations(config, program, world)
    seconds = [run(number) for number in range(NUM_ITERATIONS)]
    del run
    gc.collect()
    return statistics.median(seconds[1:])


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
