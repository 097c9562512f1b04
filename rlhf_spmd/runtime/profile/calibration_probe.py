"""Scales a calibration from another machine to the current one by a short probe, for a run's forecast.

The probe repeats a few measurements of the calibration (plan/cost/calibration_scaling.py) with the code of `profile`:
on all ranks at the same time, in processor seconds if ranks share cores. The share of time for which the ranks had a
processor tells how many of them can compute at full speed, whatever the limit: cores, a container's quota, other
processes. The probe runs after training, for the forecast that is printed next to the measured seconds. It takes at
most a tenth of the time of the iterations, and at most LIMIT_S.

Only this forecast is scaled. `plan` is about a described cluster, and runs without torch. `--strategy auto` uses the
calibration unscaled: a run's plan must not depend on other processes at its start, and a common factor would not change
the choice (`plan --measure-top` decides by measurement). GPUs are not probed: a calibration of a type of GPU holds for
all of them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from statistics import fmean
from typing import Literal

import torch

from rlhf_spmd.config.options import Config
from rlhf_spmd.plan.cost.calibration import Calibration, Device, Machine, Measured
from rlhf_spmd.plan.cost.calibration_scaling import (
    NUM_LAYERS,
    NUM_ROWS,
    NUM_TOKENS,
    ROUND_S,
    Pieces,
    Scale,
    expected,
    probed_table,
    scaled,
)
from rlhf_spmd.plan.cost.seconds import Lengths
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.workload import Workload
from rlhf_spmd.runtime.profile.clock import last_level_cache_bytes
from rlhf_spmd.runtime.profile.machine import machines
from rlhf_spmd.runtime.profile.measured_sizes import Grid
from rlhf_spmd.runtime.profile.model_timings import TimedModel
from rlhf_spmd.runtime.weights.rank_models import DTYPES
from rlhf_spmd.runtime.world.world import World

LIMIT_S = 2.0  # of a probe
SHARE = 0.1  # limit relative to the seconds of the iterations
USED = 0.85  # share of the limit that is used, a margin for late ranks
LEAST_S = 0.1  # a shorter probe is not meaningful
NAMES: dict[int, Literal["float32", "bfloat16"]] = {4: "float32", 2: "bfloat16"}  # by bytes of a weight


@dataclass(frozen=True, slots=True)
class AtHand:
    """A calibration for the current machine, and the given one.

    scale: the factors of its seconds, after a probe; None: it was not scaled, because it was made on this machine, or
        has constants alone, of no one machine, or for the reason why_not: then nothing is forecast.
    """

    given: Calibration
    calibration: Calibration
    scale: Scale | None = None
    why_not: str = ""


def at_hand(world: World, config: Config, program: Program, calibration: Calibration, trained_s: float) -> AtHand:
    """Returns the calibration, scaled to the ranks of this world unless it was made on such a machine. Collective.

    trained_s: seconds of the run's iterations; the value of rank 0 counts.
    """
    every = machines(world)
    began = time.perf_counter()
    unscaled = AtHand(calibration, calibration)
    limit_s = min(LIMIT_S, SHARE * world.bcast(trained_s, what="the seconds of the iterations"))
    types = program.cluster.device_types
    pieces = pieces_of(calibration.devices[types[0]])
    on_gpus = world.computes.index is not None
    has_constants_alone = on_gpus or (pieces is None and list(types) == ["cpu"])
    if all(machine == calibration.machine for machine in every) or (
        calibration.machine is None and has_constants_alone
    ):
        return unscaled
    workflow = program.workload.workflow
    if on_gpus:
        why_not = "the calibration was made elsewhere, and GPUs are not probed"
    elif len(types) > 1:
        why_not = "the devices are of several types"
    elif not any(workflow.heads[model] == "lm" for model in workflow.trained_models):
        why_not = "the probe trains a language model, and this run trains none"
    elif pieces is None:
        why_not = "the calibration has no tables of a model small enough for a probe"
    elif limit_s < LEAST_S:
        why_not = "the run was too short for a probe"
    else:
        table, grid, rows = pieces
        until = began + USED * limit_s
        result = measure_pieces(world, config, program.workload, table, grid, rows, until=until)
        results = world.allgather(result, "the probe")
        if all(seconds for seconds, _ in results):
            workers = num_workers(world.nodes, [share for _, share in results], every)
            scale = Scale.of([Pieces(*seconds) for seconds, _ in results], expected(table, rows), workers)
            changed = scaled(calibration, types[0], scale)
            return replace(unscaled, calibration=changed, scale=scale)
        why_not = "this machine was too slow, or too busy, for a probe"
    return replace(unscaled, why_not=why_not)


def num_workers(nodes: Sequence[int], shares: Sequence[float], every: Sequence[Machine]) -> float:
    """Returns how many ranks of a node compute at full speed at the same time, the mean over all nodes. It is limited
    by the machine's cores, because ranks do not begin and end at exactly the same time.

    nodes, shares, every: for each rank its node, the share of time for which it had its cores, and its machine.
    """
    of_node: dict[int, float] = {}
    for node, share in zip(nodes, shares, strict=True):
        of_node[node] = of_node.get(node, 0.0) + share
    most = {node: machine.cores / machine.threads for node, machine in zip(nodes, every, strict=True)}
    return fmean(min(total, most[node]) for node, total in of_node.items())


def pieces_of(device: Device) -> tuple[Measured, Grid, Lengths] | None:
    """Returns the measurements to repeat: a table, the lengths that it was measured with, and the rows of a round, as
    many as there is time for according to the table; None without such a table."""
    table = probed_table(device)
    if table is None:
        return None
    assert table.prefill is not None, "probed_table() asks for it"
    prompt, longest, mean = round(table.prefill.lengths[-1]), table.forward.lengths[-1], table.forward.lengths[0]
    grid = Grid(prompt, round(longest) - prompt, (mean / longest,), 1, 1, (1,))
    for num_rows in NUM_ROWS:
        rows = grid.rows(mean / longest, num_rows)
        if expected(table, rows).sum <= ROUND_S:
            return table, grid, rows
    return None


def measure_pieces(
    world: World, config: Config, workload: Workload, table: Measured, grid: Grid, rows: Lengths, *, until: float
) -> tuple[list[float] | None, float]:
    """Returns the seconds of the Pieces on this rank with its own cores (None: there was no time for all), and the
    share of time for which it had them. Collective.

    until: of time.perf_counter.
    """
    dtype = config.dtype if DTYPES[config.dtype].itemsize == table.param_bytes else NAMES[table.param_bytes]
    grid = replace(grid, max_response=max(grid.max_response, NUM_TOKENS))
    drawn, trained = (
        TimedModel(world, replace(config, dtype=dtype), workload, grid, table.shape, 1, NUM_LAYERS) for _ in range(2)
    )
    inputs, engine = drawn.rows(rows), trained.engine()
    prompts_BP = drawn.tokens([prompt for prompt, _ in rows])

    def train() -> None:
        trained.train(engine, inputs)
        trained.train(engine, inputs, update=True)

    works = (partial(drawn.infer, inputs), train, partial(drawn.generate, prompts_BP, [NUM_TOKENS] * len(rows)))
    others = torch.zeros(2 * last_level_cache_bytes(None) // 4)
    world.barrier("the start of the probe")
    seconds, share = repeat(works, until, timer=time.thread_time, cool=partial(others.add_, 1))
    return list(map(fmean, seconds)) if all(seconds) else None, share


def repeat(
    works: Sequence[Callable[[], object]], until: float, *, timer: Callable[[], float], cool: Callable[[], object]
) -> tuple[list[list[float]], float]:
    """Runs the works in turns -> the seconds of all repetitions of each, and the share of elapsed time that the timer
    counted.

    A work begins only before `until` (of time.perf_counter), and only if it would end by then, given its longest time
    so far. The remaining time is spent in `cool` (see clock.Clock), so that ranks that share cores do so to the end.
    The first repetition, in which libraries initialise, counts only if there is no other."""
    seconds: list[list[float]] = [[] for _ in works]
    longest_s = [0.0 for _ in works]
    began, timer_began = time.perf_counter(), timer()
    for place in cycle(range(len(works))):
        turn_began = time.perf_counter()
        if turn_began + longest_s[place] > until:
            break
        cool()
        work_began = timer()
        works[place]()
        seconds[place].append(timer() - work_began)
        longest_s[place] = max(longest_s[place], time.perf_counter() - turn_began)
    while time.perf_counter() < until:
        cool()
    share = (timer() - timer_began) / (time.perf_counter() - began)
    return [times[1:] or times for times in seconds], share
