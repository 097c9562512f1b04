"""Measures the seconds of an iteration of a program: runs a few on the ranks of this world, without files."""

import gc
import statistics
import time

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
    job = prepare(config, program, world)
    executor = Executor(program, world, job.models, job.calls, Tracer(world.rank, clock=clock_of(world.device)))
    state, seconds = RunState(config.algorithm.initial_state(config.options)), []
    for number in range(NUM_ITERATIONS):
        data = make_iteration(job, number)
        world.barrier("the start of an iteration")
        began = time.perf_counter()
        executor.iteration(data, state)
        seconds.append(time.perf_counter() - began)
    del job, executor, data
    gc.collect()
    return max(world.allgather(statistics.median(seconds[1:]), "the seconds of an iteration"))
