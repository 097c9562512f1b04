"""A forecast is of the machine at hand: a calibration that was made elsewhere is scaled by a short probe.

The probe measures a few numbers of the calibration again (plan/cost/scaling.py), as `profile` measured them: by its
code, on all ranks at the same time, in processor seconds where ranks share cores. The part of the clock for which the
ranks have a processor meanwhile is how many of them can compute at full speed, whatever limits it: cores, a container's
quota, other processes. The probe runs after training, for the forecast that is printed beside the measured seconds. It
takes at most a tenth of what the iterations took, and never more than LIMIT_S.

Nothing else is scaled. `plan` is about a cluster that is described, and runs without torch. `--strategy auto` chooses
by the calibration as it is: which plan a run gets must not depend on what else the machine did at its start, and one
factor of all seconds would change no choice (`plan --measure-top` lets measurement decide). A calibration of GPUs is
scaled only on ranks that compute on GPUs, and if it has tables of measured shapes; none comes with the package.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle
from statistics import fmean

import torch

from rlhf_spmd.config import Config
from rlhf_spmd.plan.cost.calibration import Calibration, Device, Machine, Measured
from rlhf_spmd.plan.cost.scaling import (
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
from rlhf_spmd.runtime.profile.clock import cache_bytes
from rlhf_spmd.runtime.profile.grid import Grid
from rlhf_spmd.runtime.profile.machine import machines
from rlhf_spmd.runtime.profile.passes import Subject
from rlhf_spmd.runtime.weights.models import DTYPES
from rlhf_spmd.runtime.world.world import World

LIMIT_S = 2.0  # of a probe
SHARE = 0.1  # that it may take of the seconds of the iterations
USED = 0.85  # of that, so that ranks may be late
LEAST_S = 0.1  # a shorter one says nothing
NAMES = {dtype.itemsize: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class AtHand:
    """A calibration for the machine at hand, and as it was given. scale: what its seconds were multiplied with, after a
    probe of probe_s seconds. None: they were not, because it was made here or for the reason why_not."""

    given: Calibration
    calibration: Calibration
    here: Machine
    scale: Scale | None = None
    probe_s: float = 0.0
    why_not: str = ""


def at_hand(world: World, config: Config, program: Program, calibration: Calibration, trained_s: float) -> AtHand:
    """The calibration scaled to the ranks of this world, unless it was made on such a machine. trained_s: seconds that
    the run's iterations took; those of rank 0 count. Collective."""
    every = machines(world)
    began = time.perf_counter()
    found = AtHand(calibration, calibration, every[0])
    limit_s = min(LIMIT_S, SHARE * world.bcast(trained_s, what="the seconds of the iterations"))
    if all(machine == calibration.machine for machine in every):
        return found
    if world.computes.index is not None:
        return replace(found, why_not="GPUs are not probed")
    types = program.cluster.device_types
    if len(types) > 1:
        return replace(found, why_not="the devices are of several types")
    pieces = pieces_of(calibration.devices[types[0]])
    if pieces is None:
        return replace(found, why_not="it has no tables of a model that is small enough for a probe")
    if limit_s < LEAST_S:
        return replace(found, why_not="the run was too short for a probe")
    table, grid, rows = pieces
    mine, share = measured(world, config, program.workload, table, grid, rows, until=began + USED * limit_s)
    told = world.allgather([*asdict(mine).values(), share] if mine else None, "the probe")
    if None in told:
        return replace(found, why_not="this machine was too slow, or too busy, for a probe")
    workers = num_workers(world.nodes, [one[-1] for one in told], every)
    scale = Scale.of([Pieces(*one[:-1]) for one in told], expected(table, rows), workers)
    changed = scaled(calibration, types[0], scale)
    return replace(found, calibration=changed, scale=scale, probe_s=time.perf_counter() - began)


def num_workers(nodes: Sequence[int], shares: Sequence[float], every: Sequence[Machine]) -> float:
    """How many ranks of a node compute at full speed at the same time, the mean of all nodes. nodes, shares, every: of
    each rank its node, for which part of the clock it had its cores, and the machine. No more than the machine has
    cores for: ranks do not begin and end at quite the same moment."""
    of_node: dict[int, float] = {}
    for node, share in zip(nodes, shares, strict=True):
        of_node[node] = of_node.get(node, 0.0) + share
    most = {node: machine.cores / machine.threads for node, machine in zip(nodes, every, strict=True)}
    return fmean(min(found, most[node]) for node, found in of_node.items())


def pieces_of(device: Device) -> tuple[Measured, Grid, Lengths] | None:
    """What is measured again: a table, the lengths that it was measured with, and the rows of a round, as many as the
    table says that there is time for; None if there is no such table."""
    table = probed_table(device)
    if table is None:
        return None
    prompt, longest, mean = round(table.prefill.lengths[-1]), table.forward.lengths[-1], table.forward.lengths[0]
    grid = Grid(prompt, round(longest) - prompt, (mean / longest,), 1, 1, (1,))
    for num_rows in NUM_ROWS:
        rows = grid.rows(mean / longest, num_rows)
        if expected(table, rows).sum <= ROUND_S:
            return table, grid, rows
    return None


def measured(
    world: World,
    config: Config,
    workload: Workload,
    table: Measured,
    grid: Grid,
    rows: Lengths,
    *,
    until: float,
) -> tuple[Pieces | None, float]:
    """Seconds of the pieces on this rank with its cores to itself (None: there was no time for all), and which part of
    the clock it had them for. until: of time.perf_counter. Collective."""
    dtype = config.dtype if DTYPES[config.dtype].itemsize == table.param_bytes else NAMES[table.param_bytes]
    grid = replace(grid, max_response=max(grid.max_response, NUM_TOKENS))
    drawn, trained = (
        Subject(world, replace(config, dtype=dtype), workload, grid, table.shape, 1, NUM_LAYERS) for _ in range(2)
    )
    inputs, engine = drawn.rows(rows), trained.engine()
    prompts_BP = drawn.tokens([prompt for prompt, _ in rows])

    def train() -> None:
        trained.train(engine, inputs)
        trained.train(engine, inputs, update=True)

    works = (
        partial(drawn.infer, inputs),
        train,
        partial(drawn.generate, prompts_BP, [NUM_TOKENS] * len(rows)),
    )
    others = torch.zeros(2 * cache_bytes(None) // 4)
    world.barrier("the begin of the probe")
    seconds, share = repeated(works, until, timer=time.thread_time, cool=partial(others.add_, 1))
    return Pieces(*map(fmean, seconds)) if all(seconds) else None, share


def repeated(
    works: Sequence[Callable[[], object]],
    until: float,
    *,
    timer: Callable[[], float],
    cool: Callable[[], object],
) -> tuple[list[list[float]], float]:
    """Seconds of each work every time, in turns, and which part of the clock the timer went on for.

    A work is begun only before `until` (of time.perf_counter), and again only if it would be over by then when it took
    as long as the longest time so far; what is left is spent in `cool` (as of profile.Clock), so that ranks that share
    cores do so to the end. The first time, in which libraries prepare themselves, counts only if there is no other."""
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
