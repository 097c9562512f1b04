"""Bytes of a rank over the time of a forecast: those that memory.py counts, each while it is held."""

from rlhf_spmd.plan.cost.memory import call_bytes, loaded_bytes, static_bytes
from rlhf_spmd.plan.cost.simulate import Forecast
from rlhf_spmd.plan.program.instructions import BUCKET_BYTES, Load, Offload, Post, Run, Wait

Steps = tuple[tuple[float, int], ...]  # (seconds, bytes from then on), in the order of time


def held(forecast: Forecast, rank: int) -> Steps:
    """Bytes on a rank's device during one iteration, as levels that begin at 0 s: `static_bytes` all the time;
    `call_bytes` during a Run (of a pipelined training step, from its begin to its update); buckets of weights from Post
    to Wait; an offloaded model from Load to Offload."""
    program = forecast.program
    static = static_bytes(program, rank)
    changes: list[tuple[float, int]] = []

    def hold(begin_s: float, end_s: float, num_bytes: int) -> None:
        if begin_s < end_s:
            changes.extend(((begin_s, num_bytes), (end_s, -num_bytes)))

    placed = program.workload.workflow.placed_calls
    calls = {call.name: sum(call_bytes(program, call, rank).values()) for call in placed}
    since: dict[object, float] = {}  # loaded model, posted transfer or call of a training step -> its begin
    for instruction, (begin_s, end_s) in zip(program.instructions[rank], forecast.times[rank], strict=True):
        if isinstance(instruction, Run) and instruction.phase in ("begin", "update"):
            since.setdefault(instruction.call, begin_s)
            if instruction.phase == "update":
                hold(since.pop(instruction.call), end_s, calls[instruction.call])
        elif isinstance(instruction, Run) and instruction.call in calls and instruction.call not in since:
            hold(begin_s, end_s, calls[instruction.call])
        elif isinstance(instruction, Post):
            since[instruction.transfer] = begin_s
        elif isinstance(instruction, Wait):
            moved = program.transfers[instruction.transfer].reallocation
            num_bytes = moved.extra_bytes(BUCKET_BYTES).get(rank, 0) if moved else 0
            hold(since.pop(instruction.transfer), end_s, num_bytes)
        elif isinstance(instruction, Load):
            since[instruction.model] = begin_s
        elif isinstance(instruction, Offload):
            loaded = max(loaded_bytes(program, call, rank) for call in placed if call.model == instruction.model)
            hold(since.pop(instruction.model), end_s, loaded)
    return _steps(sum(static.values()) - static["offloaded"], changes)


def most_bytes(forecast: Forecast) -> int:
    """The most bytes that any device holds at one time."""
    return max(size for rank in forecast.program.cluster.ranks for _, size in held(forecast, rank))


def _steps(now: int, changes: list[tuple[float, int]]) -> Steps:
    """Running sums of the changes; at the same moment, bytes are freed before others are taken."""
    levels = {0.0: now}
    for moment, change in sorted(changes):
        now += change
        levels[moment] = now
    return tuple(levels.items())
