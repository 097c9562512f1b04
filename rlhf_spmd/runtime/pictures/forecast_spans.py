"""A forecast as the spans of a trace, to be drawn like a measured run."""

from rlhf_spmd.plan.cost.forecast_summary import runs
from rlhf_spmd.plan.cost.simulate import Forecast
from rlhf_spmd.plan.program.instructions import Agree, Load, Run, Wait


def spans_of_forecast(found: Forecast) -> list[dict[str, object]]:
    """A forecast in the form of trace.Tracer.to_records, so that it is drawn like a measured run."""
    cluster, spans_of = found.program.cluster, []
    began = iter(runs(found))
    for rank, (steps, times) in enumerate(zip(found.program.instructions, found.times, strict=True)):
        spans: list[tuple[str, str, float, float]] = []
        for step, (begin_s, end_s) in zip(steps, times, strict=True):
            if isinstance(step, Run):
                came_s = next(began)[2]
                spans.append((f"wait for {step.group}", "wait", begin_s, came_s))
                spans.append((step.call, "compute", came_s, end_s))
            elif isinstance(step, Wait):
                spans.append((f"wait {found.program.transfers[step.transfer].what}", "wait", begin_s, end_s))
            elif isinstance(step, Load):
                spans.append((f"load {step.model}", "transfer", begin_s, end_s))
            elif isinstance(step, Agree):
                spans.append((f"agree on {step.what}", "wait", begin_s, end_s))  # sends next to nothing
        taken = [[*span, 0, {}] for span in spans if span[2] < span[3]]
        spans_of.append({"rank": rank, "host": f"node {cluster.node_of(rank)}", "spans": taken})
    return spans_of
