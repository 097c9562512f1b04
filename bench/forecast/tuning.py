"""The options of a strategy that a sensible user would pick: the fastest forecast of a grid among those that fit.

Memory and a bound of the seconds need the layouts alone, so each point of the grid gets both before anything is
compiled. The bound is what the calls take where nothing waits for a message. Points are then compiled and simulated in
the order of their bounds, until no bound is below the best forecast (or `most` are made).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.strategy import Strategy
from rlhf_spmd.plan.calls import Generate, Train
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.cost.forecast import forecast, times_of
from rlhf_spmd.plan.cost.memory import peak_bytes, static_bytes, working_bytes
from rlhf_spmd.plan.cost.simulate import Forecast
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.instructions import Program, Run
from rlhf_spmd.plan.program.pipeline import usual_number
from rlhf_spmd.plan.proof.memory_check import memory
from rlhf_spmd.plan.validate import validate
from rlhf_spmd.plan.workload import Workload

MOST_FORECASTS = 30  # of one grid; bounds are so near that a dozen usually settle it


@dataclass(frozen=True, slots=True)
class Found:
    """What a strategy comes to. Without a program or a forecast, which is where nothing fits, `why` explains.

    counts: of the search, and what else a row tells of it.
    """

    options: Mapping[str, Any]
    program: Program | None
    forecast: Forecast | None
    why: str = ""
    counts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Known:
    """Caches values that depend on few layouts, for all points of a grid."""

    workload: Workload
    cluster: Cluster
    calibration: Calibration
    bytes_of: dict[tuple, int]
    seconds_of: dict[tuple, float]

    def without_instructions(self, placement: Placement) -> Program:
        """Returns a program with layouts but nothing to execute: enough for bytes, and for seconds of single calls."""
        return Program(self.workload, placement, self.cluster, {}, (), ((),) * self.cluster.num_devices)

    def excess_bytes(self, placement: Placement) -> int:
        """Counts bytes that the fullest device lacks; 0: all fits. Ranks of one stage of all calls hold the same."""
        program, calls = self.without_instructions(placement), self.workload.workflow.placed_calls
        most = 0
        for rank in _different(placement, self.cluster):
            limit = self.cluster.usable_bytes(rank)
            if limit is None:
                continue
            mine = [(call.name, placement.layouts[call.name]) for call in calls]
            key = (rank, *(pair for pair in mine if rank in pair[1].ranks))
            if key not in self.bytes_of:
                self.bytes_of[key] = peak_bytes(static_bytes(program, rank), working_bytes(program, rank))
            most = max(most, self.bytes_of[key] - limit)
        return most

    def least_s(self, placement: Placement) -> float:
        """Bounds a forecast from below: generation, inference and training, each on its busiest rank, one after
        another. Where they stream, only one mini-batch of the others lies before or behind. In a chain, training of
        models that the first call does not need may overlap with the next iteration."""
        chains, first = placement.chains(self.workload), self.workload.workflow.placed_calls[0].model
        busy_s: dict[str, dict[int, float]] = {"generate": {}, "infer": {}, "train": {}}
        whole_s: dict[int, float] = {}
        for call in self.workload.workflow.placed_calls:
            seconds = self._call_s(placement, call)
            for rank in placement.layouts[call.name].ranks:
                if not (chains and call.kind == "train" and call.model != first):
                    busy_s[call.kind][rank] = busy_s[call.kind].get(rank, 0.0) + seconds
                whole_s[rank] = whole_s.get(rank, 0.0) + seconds
        phases_s = [max(ranks.values(), default=0.0) for ranks in busy_s.values()]
        number = self.workload.num_mini_batches if placement.streams(self.workload) else 1
        lines_s = (phase_s + (sum(phases_s) - phase_s) / number for phase_s in phases_s)
        return max(*lines_s, *whole_s.values())

    def _call_s(self, placement: Placement, call) -> float:
        """Returns the seconds of a call in an iteration, on the first or the last rank of its layout: the last stage of
        a pipeline also has the output layer, and the others wait for it."""
        layout, workflow = placement.layouts[call.name], self.workload.workflow
        train = workflow.train_call(call.model)
        home = placement.layouts[train.name] if train else None
        if isinstance(call, Generate):
            layout = replace(layout, micro_batch=None)  # which does not matter to it
        key = (call.name, layout, home if home and home.zero == 3 else None)  # weights are gathered from there
        if key not in self.seconds_of:
            program = self.without_instructions(placement)
            trains = isinstance(call, Train)
            step = Run(call.name, mini_batch=0 if trains else None)
            times = times_of(program, self.calibration)
            ends = (layout.ranks[0], layout.ranks[-1])[: layout.pp]
            seconds = max(times.run_s(rank, step) for rank in ends)
            if layout.pp > 1 and not isinstance(call, Generate):  # which has all stages already
                number = usual_number(program, step)
                seconds *= (number + layout.pp - 1) / number
            steps = self.workload.num_mini_batches * self.workload.epochs if trains else 1
            self.seconds_of[key] = steps * seconds
        return self.seconds_of[key]


def _different(placement: Placement, cluster: Cluster) -> list[int]:
    """Returns one rank of each kind: on the same type of device, with the same stages of the same calls."""
    found: dict[tuple, int] = {}
    for rank in cluster.ranks:
        layouts = placement.layouts.items()
        stages = [(name, layout.coordinates(rank)[1]) for name, layout in layouts if rank in layout.ranks]
        found.setdefault((cluster.nodes[cluster.node_of(rank)].device, *stages), rank)
    return list(found.values())


def best_options(
    strategy: Strategy,
    workload: Workload,
    cluster: Cluster,
    calibration: Calibration,
    grid: Mapping[str, Sequence[Any]],
    later: Mapping[str, Sequence[Any]] | None = None,
    *,
    most: int = MOST_FORECASTS,
) -> Found:
    """Finds the point of a grid (option -> values) with the shortest forecast among those that fit the devices. Points
    that place() or `validate` refuses are left out.

    later: options that are then chosen one after another.
    most: forecasts of the grid.
    """
    known = _Known(workload, cluster, calibration, {}, {})
    fitting: list[tuple[float, int, dict[str, Any]]] = []
    nearest: tuple[int, dict[str, Any]] | None = None
    refused = ""
    points = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    for number, options in enumerate(points):
        try:
            placement = strategy.place(workload, cluster, **options)
            validate(placement, workload, cluster)
        except UserError as error:
            refused = refused or str(error)
            continue
        excess = known.excess_bytes(placement)
        if excess == 0:
            fitting.append((known.least_s(placement), number, options))
        elif nearest is None or excess < nearest[0]:
            nearest = excess, options
    best: tuple[dict[str, Any], Program, Forecast] | None = None
    num_forecasts = 0
    for least_s, _, options in sorted(fitting, key=lambda entry: entry[:2]):
        if num_forecasts == most or (best is not None and least_s >= best[2].makespan_s):
            break
        found = _forecast(strategy, workload, cluster, calibration, options)
        num_forecasts += 1
        if found is None:  # the buckets of weights on their way may be what is too much
            nearest = nearest or (0, options)
        elif best is None or found[2].makespan_s < best[2].makespan_s:
            best = found
    for name, values in (later or {}).items() if best else ():
        for value in values:
            found = _forecast(strategy, workload, cluster, calibration, best[0] | {name: value})
            num_forecasts += 1
            if found is not None and found[2].makespan_s < best[2].makespan_s:
                best = found
    why = "" if best else _why(nearest, refused)
    counts = {"num_points": len(points), "num_fit": len(fitting), "num_forecasts": num_forecasts}
    return Found(*(best or ({}, None, None)), why, counts)


def _forecast(
    strategy: Strategy, workload: Workload, cluster: Cluster, calibration: Calibration, options: dict[str, Any]
) -> tuple[dict[str, Any], Program, Forecast] | None:
    """Forecasts a program with some options; returns None if the strategy refuses them or they do not fit."""
    try:
        program = strategy.compile(workload, cluster, options)
    except UserError:
        return None
    return None if memory(program) else (options, program, forecast(program, calibration))


def _why(nearest: tuple[int, dict[str, Any]] | None, refused: str) -> str:
    if nearest is None:
        return refused
    words = " ".join(f"{name}={value}" for name, value in nearest[1].items())
    return f"does not fit: {max(nearest[0], 1) / 2**30:.1f} GiB too much at best, with {words}"
