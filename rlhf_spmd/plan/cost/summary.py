"""A forecast in few numbers: seconds of each call and each phase, and how much of the devices' time is lost."""

from collections.abc import Iterable

from rlhf_spmd.plan.cost.simulate import Forecast
from rlhf_spmd.plan.program.instructions import Run

PHASES = {
    "generate": "generation",
    "infer": "inference",
    "compute": "inference",
    "train": "training",
}  # by kind of call


def runs(forecast: Forecast) -> Iterable[tuple[int, Run, float, float]]:
    """Every Run: rank, step, when it began to compute (a Run with a group: when its last rank came), when it ended."""
    program = forecast.program
    came_s: dict[Run, float] = {}  # the last rank, of Runs with a group
    found = []
    for rank, (steps, spans) in enumerate(zip(program.instructions, forecast.times, strict=True)):
        for step, (begin_s, end_s) in zip(steps, spans, strict=True):
            if isinstance(step, Run):
                found.append((rank, step, begin_s, end_s))
                if step.group is not None:
                    came_s[step] = max(came_s.get(step, 0.0), begin_s)
    return [(rank, step, came_s.get(step, begin_s), end_s) for rank, step, begin_s, end_s in found]


def call_s(forecast: Forecast) -> dict[str, float]:
    """Seconds that each call takes in one iteration, on the rank that it keeps busy longest."""
    of_rank: dict[tuple[str, int], float] = {}
    for rank, step, begin_s, end_s in runs(forecast):
        of_rank[step.call, rank] = of_rank.get((step.call, rank), 0.0) + end_s - begin_s
    calls = [call.name for call in forecast.program.workload.workflow.calls]
    return {call: max((s for (name, _), s in of_rank.items() if name == call), default=0.0) for call in calls}


def phase_s(forecast: Forecast) -> dict[str, float]:
    """Seconds during which some rank generates, infers or trains. Phases that overlap sum to more than an iteration."""
    workflow = forecast.program.workload.workflow
    spans: dict[str, list[tuple[float, float]]] = {phase: [] for phase in PHASES.values()}
    for _, step, begin_s, end_s in runs(forecast):
        spans[PHASES[workflow.call(step.call).kind]].append((begin_s, end_s))
    return {phase: _union_s(found) for phase, found in spans.items()}


def bubble(forecast: Forecast) -> float:
    """The share of all ranks' time in which they compute nothing: they wait, or have no work."""
    busy_s = sum(end_s - begin_s for _, _, begin_s, end_s in runs(forecast))
    whole_s = forecast.makespan_s * forecast.program.cluster.num_devices
    return 1 - busy_s / whole_s if whole_s else 0.0


def _union_s(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that at least one span covers."""
    total_s, until_s = 0.0, float("-inf")
    for begin_s, end_s in sorted(spans):
        total_s += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return total_s
