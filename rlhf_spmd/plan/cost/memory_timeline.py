"""Bytes of a rank over the time of a forecast: what memory.py counts, each from when it is there until it is gone."""

from rlhf_spmd.plan.cost.memory import LIVE_NUMEL, activation_bytes, cache_bytes, num_params, reduce_numel, static_bytes
from rlhf_spmd.plan.cost.simulate import Forecast
from rlhf_spmd.plan.placement import uses_home
from rlhf_spmd.plan.program.instructions import BUCKET_BYTES, Load, Offload, Post, Program, Run, Wait
from rlhf_spmd.plan.workflow import Call

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

    calls = {call.name: _call_bytes(program, call, rank) for call in program.workload.workflow.placed_calls}
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
            hold(since.pop(step.model), end_s, _loaded_bytes(program, step.model, rank))
    return _steps(sum(static.values()) - static["offloaded"], changes)


def most_bytes(forecast: Forecast) -> int:
    """The most that a device holds at one time, of the rank that holds most."""
    return max(size for rank in forecast.program.cluster.ranks for _, size in held(forecast, rank))


def _call_bytes(program: Program, call: Call, rank: int) -> int:
    """What a call works with besides what stays, as memory.working_bytes counts it; an offloaded model's weights are
    held by its Load."""
    workload, layouts = program.workload, program.placement.layouts
    layout, shape = layouts[call.name], workload.models[call.model]
    if rank not in layout.ranks or shape is None:
        return 0
    shard = layout.shard(rank)
    params = num_params(shape, shard)
    train = workload.workflow.train_call(call.model)
    home = layouts[train.name] if train and uses_home(call, rank, workload, program.placement) else layout
    total = 0
    if home.zero == 3 and home.dp > 1:
        total += workload.param_bytes * (min(params, LIVE_NUMEL) if call.kind == "train" else params)
    if call.kind == "train":
        total += activation_bytes(workload, call, layout, rank)
        if layout.zero == 2 and layout.dp > 1:
            total += 4 * (-(-params // layout.dp) + reduce_numel(shape, shard))
    elif call.kind == "generate":
        total += cache_bytes(workload, call, layout, rank)
    return total


def _loaded_bytes(program: Program, model: str, rank: int) -> int:
    """The weights of a frozen model that come from host memory."""
    workload, layouts = program.workload, program.placement.layouts
    calls = [call for call in workload.workflow.placed_calls if call.model == model]
    layout = next(layouts[call.name] for call in calls if layouts[call.name].offload)
    return workload.param_bytes * num_params(workload.models[model], layout.shard(rank))


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
