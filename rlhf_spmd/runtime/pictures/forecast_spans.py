"""A forecast as the spans of a trace, to be drawn like a measured run."""

from collections.abc import Iterable, Iterator

from rlhf_spmd.plan.cost.forecast_summary import runs
from rlhf_spmd.plan.cost.simulate import Forecast
from rlhf_spmd.plan.program.instructions import Agree, Load, Run, Wait

Part = tuple[str, str, float, float]  # of an iteration: name, category, begin and end in seconds


def spans_of_forecast(found: Forecast) -> list[dict[str, object]]:
    """Returns a forecast in the form of trace.Tracer.to_records, so that it is drawn like a measured run. In a chain
    there are two iterations, numbered, and what is left of earlier ones meanwhile."""
    cluster, spans_of = found.program.cluster, []
    began = iter(runs(found))
    for rank, (instructions, times) in enumerate(zip(found.program.instructions, found.times, strict=True)):
        spans: list[Part] = []
        for instruction, (begin_s, end_s) in zip(instructions, times, strict=True):
            if isinstance(instruction, Run):
                came_s = next(began)[2]
                spans.append((f"wait for {instruction.group}", "wait", begin_s, came_s))
                spans.append((instruction.call, "compute", came_s, end_s))
            elif isinstance(instruction, Wait):
                spans.append((f"wait {found.program.transfers[instruction.transfer].what}", "wait", begin_s, end_s))
            elif isinstance(instruction, Load):
                spans.append((f"load {instruction.model}", "transfer", begin_s, end_s))
            elif isinstance(instruction, Agree):
                spans.append((f"agree on {instruction.what}", "wait", begin_s, end_s))  # sends next to nothing
        taken = [list(span) for span in _in_a_row(found, spans) if span[2] < span[3]]
        spans_of.append({"rank": rank, "host": f"node {cluster.node_of(rank)}", "spans": taken})
    return spans_of


def _in_a_row(found: Forecast, spans: Iterable[Part]) -> Iterator[tuple[str, str, float, float, int | None, object]]:
    """Yields the spans of a rank with the numbers of their iterations; in a chain for the time of two."""
    period_s = found.period_s
    if not period_s:
        yield from ((*span, None, {}) for span in spans)
        return
    longest_s = max(times[-1][1] for times in found.times)
    for number in range(-int(longest_s / period_s), 2):
        late_s, shown = number * period_s, number if number >= 0 else None
        for name, category, begin_s, end_s in spans:
            yield name, category, max(0.0, begin_s + late_s), min(2 * period_s, end_s + late_s), shown, {}
