"""Bytes of a rank over the time of a forecast: what memory.py counts, each from when it is there until it is gone."""

from rlhf_spmd.plan.cost.memory import call_bytes, loaded_bytes, static_bytes
from rlhf_spmd.plan.cost.simulate import Forecast
from rlhf_spmd.plan.program.instructions import BUCKET_BYTES, Load, Offload, Post, Run, Wait

Steps = tuple[tuple[float, int], ...]  # (seconds, bytes from then on), in the order of time


def held(forecast: Forecast, rank: int) -> Steps:
    """Bytes on a rank's device through one iteration, as steps that begin at 0 s. What stays is there all the time;
    besides, a Run holds what its call works with (a pipelined training step, from its beginning to its update), weights
    on their way hold buckets from Post to Wait, and an offloaded model is there from Load to Offload."""
    program = forecast.program
    static = static_bytes(program, rank)
    changes: list[tuple[float, int]] = []

    def hold(begin_s: float, end_s: float, num_bytes: int) -> None:
        if begin_s < end_s:
            changes.extend(((begin_s, num_bytes), (end_s, -num_bytes)))

    placed = program.workload.workflow.placed_calls
    calls = {call.name: sum(call_bytes(program, call, rank).values()) for call in placed}
    since: dict[object, float] = {}  # a model that is loaded, a transfer that is posted, a step that is under way
    for step, (begin_s, end_s) in zip(program.instructions[rank], forecast.times[rank], strict=True):
        if isinstance(step, Run) and step.phase in ("begin", "update"):
            since.setdefault(step.call, begin_s)
            if step.phase == "update":
                hold(since.pop(step.call), end_s, calls[step.call])
        elif isinstance(step, Run) and step.call in calls and step.call not in since:
            hold(begin_s, end_s, calls[step.call])
        elif isinstance(step, Post):
            since[step.transfer] = begin_s
        elif isinstance(step, Wait):
            moved = program.transfers[step.transfer].reallocation
            num_bytes = moved.extra_bytes(BUCKET_BYTES).get(rank, 0) if moved else 0
            hold(since.pop(step.transfer), end_s, num_bytes)
        elif isinstance(step, Load):
            since[step.model] = begin_s
        elif isinstance(step, Offload):
            loaded = max(loaded_bytes(program, call, rank) for call in placed if call.model == step.model)
            hold(since.pop(step.model), end_s, loaded)
    return _steps(sum(static.values()) - static["offloaded"], changes)


def most_bytes(forecast: Forecast) -> int:
    """The most that a device holds at one time, of the rank that holds most."""
    return max(size for rank in forecast.program.cluster.ranks for _, size in held(forecast, rank))


def _steps(now: int, changes: list[tuple[float, int]]) -> Steps:
    """Sums of what comes and goes; at one moment all that goes leaves before anything comes."""
    found = [(0.0, now)]
    for moment, change in sorted(changes):
        now += change
        if found[-1][0] == moment:
            found[-1] = (moment, now)
        else:
            found.append((moment, now))
    return tuple(found)
