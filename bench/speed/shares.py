"""Where the time of an iteration goes on a rank: computing, waiting for what peers compute, and everything else.

A Wait waits for a peer's computation until the last peer has posted its part (for weights: until all ranks of their
chains stand at the Wait; between the stages of a pipeline: all the time); an Agree until the last rank is there.
What remains is the control plane: messages on their way, the interpreter between instructions, prompts, logs, files.
Collectives inside a call (gradients, say) count as that call's computation. Iterations that follow one another without
a meeting have no such shares.
"""

from collections.abc import Sequence

from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.runtime.world.trace import Lane, Span

KINDS = ("compute", "waiting", "control")


def shares(lanes: Sequence[Lane], program: Program) -> list[dict[str, float]]:
    """Returns, per rank and iteration (but for the first one, whose beginning is unknown), the seconds in all, and of
    each kind."""
    agreed = [{span.iteration: span for span in lane.spans if span.category == "control"} for lane in lanes]
    posted, waited = (_starts(lanes, kind) for kind in ("transfer", "wait"))
    found = []
    for lane in lanes:
        for number in sorted(agreed[lane.rank])[1:]:
            spans = [span for span in lane.spans if span.iteration == number]
            compute_s = sum(span.end_s - span.start_s for span in spans if span.category == "compute")
            waiting_s = 0.0
            for span in spans:
                if span.category == "wait" and "transfer" in span.args:
                    key = number, span.args["transfer"]
                    transfer = program.transfers[span.args["transfer"]]
                    if transfer.reallocation is not None:
                        ready_s = max(waited[rank][key] for rank in transfer.ranks)
                    else:
                        ready_s = max(posted[peer][key] for peer in transfer.peers(lane.rank))
                elif span.category == "wait":
                    ready_s = span.end_s
                elif span.category == "control":
                    ready_s = max(ends[number].start_s for ends in agreed)
                else:
                    continue
                waiting_s += _until(span, ready_s)
            total_s = agreed[lane.rank][number].end_s - agreed[lane.rank][number - 1].end_s
            control_s = total_s - compute_s - waiting_s
            found.append({"total_s": total_s, "compute_s": compute_s, "waiting_s": waiting_s, "control_s": control_s})
    return found


def _starts(lanes: Sequence[Lane], kind: str) -> list[dict[tuple[int, int], float]]:
    """Returns, for each rank, when its Post, or its Wait, of an iteration and a transfer began."""
    return [
        {
            (span.iteration, span.args["transfer"]): span.start_s
            for span in lane.spans
            if span.category == kind and "transfer" in span.args
        }
        for lane in lanes
    ]


def _until(span: Span, ready_s: float) -> float:
    """Returns the seconds of a span before `ready_s`."""
    return max(0.0, min(span.end_s, ready_s) - span.start_s)


def mean_shares(lanes: Sequence[Lane], program: Program) -> dict[str, float]:
    """Returns the share of each kind in the time of all ranks."""
    found = shares(lanes, program)
    total_s = sum(row["total_s"] for row in found)
    return {kind: sum(row[f"{kind}_s"] for row in found) / total_s for kind in KINDS}
