"""A forecast in a few numbers: seconds of each call, and the share of the ranks' time that is idle."""

from collections.abc import Iterable

from rlhf_spmd.plan.cost.simulate import Forecast
from rlhf_spmd.plan.program.instructions import Run


def runs(forecast: Forecast) -> Iterable[tuple[int, Run, float, float]]:
    """Returns every Run: rank, run, begin of the computation (with a group: when its last rank arrived), and end."""
    program = forecast.program
    came_s: dict[Run, float] = {}  # Run with a group -> arrival of its last rank
    begun = []
    for rank, (instructions, spans) in enumerate(zip(program.instructions, forecast.times, strict=True)):
        for instruction, (begin_s, end_s) in zip(instructions, spans, strict=True):
            if isinstance(instruction, Run):
                begun.append((rank, instruction, begin_s, end_s))
                if instruction.group is not None:
                    came_s[instruction] = max(came_s.get(instruction, 0.0), begin_s)
    return [(rank, run, came_s.get(run, begin_s), end_s) for rank, run, begin_s, end_s in begun]


def call_s(forecast: Forecast) -> dict[str, float]:
    """Returns seconds of each call in one iteration, on the rank where it takes longest."""
    of_rank: dict[tuple[str, int], float] = {}
    for rank, run, begin_s, end_s in runs(forecast):
        of_rank[run.call, rank] = of_rank.get((run.call, rank), 0.0) + end_s - begin_s
    calls = [call.name for call in forecast.program.workload.workflow.calls]
    return {call: max((s for (name, _), s in of_rank.items() if name == call), default=0.0) for call in calls}


def bubble(forecast: Forecast) -> float:
    """Returns the share of all ranks' time in which they wait or have no work; in a chain, from one iteration to the
    next, none of which is drained."""
    busy_s = sum(end_s - begin_s for _, _, begin_s, end_s in runs(forecast))
    whole_s = forecast.makespan_s * forecast.program.cluster.num_devices
    return 1 - busy_s / whole_s if whole_s else 0.0
