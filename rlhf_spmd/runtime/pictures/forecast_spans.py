"""A forecast as the spans of a trace, to be drawn like a measured run."""

from rlhf_spmd.plan.cost.forecast_summary import runs
from rlhf_spmd.plan.cost.simulate import Forecast
from rlhf_spmd.plan.program.instructions import Agree, Load, Run, Wait


def spans_of_forecast(found: Forecast) -> list[dict[str, object]]:
    """Returns a forecast in the form of trace.Tracer.to_records, so that it is drawn like a measured run."""
    cluster, spans_of = found.program.cluster, []
    began = iter(runs(found))
    for rank, (instructions, times) in enumerate(zip(found.program.instructions, found.times, strict=True)):
        spans: list[tuple[str, str, float, float]] = []
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
        taken: list[list[object]] = [[*span, None, {}] for span in spans if span[2] < span[3]]
        spans_of.append({"rank": rank, "host": f"node {cluster.node_of(rank)}", "spans": taken})
    return spans_of
