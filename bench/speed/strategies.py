"""The embedded model under each strategy: seconds per iteration, bytes that move and that a rank holds, how busy the
ranks are, the control plane's share.

At 4 ranks, as the demo runs, and at 2, where each rank has a core to itself on two cores. Of the runs at 2 ranks the
median iterations are kept in bench/results/timelines.json, and of the demo's strategy at 4 two iterations, which
`python -m tools pictures` draws. Run it on a machine with nothing else to do.

Where time goes on a rank: computing, waiting for what peers compute, and everything else. A Wait waits for a peer's
computation until the last peer has posted its part (for weights: until all ranks of their chains stand at the Wait;
between the stages of a pipeline: all the time); an Agree until the last rank is there. What remains is the control
plane: messages on their way, the interpreter between instructions, prompts, logs, files. Collectives inside a call
(gradients, say) count as that call's computation. Iterations that follow one another without a meeting have no such
shares.

Cost: eight minutes on two cores; half a minute with --quick (three short cases, which judge and write nothing).
Command: python -m bench strategies [--quick]
"""

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.faults.faults import strategy_words
from bench.rows import TIMELINES, Arguments, provenance, train, write
from bench.tables import ended
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.machines.cluster_file import read_cluster
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.memory import static_bytes
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.runtime.world.trace import Lane, Span, lanes, read_chrome

DRAWN = ("flattening", "interleaving1", "interleaving2", "separation")
DRAWN_RANKS = 2
DEMO = (4, "separation", ())
CASES = [(2, name, ()) for name in DRAWN]
CASES += [(2, "reallocation", ("training_tp=2",))]
CASES += [(4, name, ()) for name in DRAWN]
CASES += [
    (4, "separation", ("generation_tp=2", "training_tp=2")),
    (4, "separation", ("training_pp=2",)),
    (4, "heterogeneous", ()),
    (4, "reallocation", ("training_tp=2",)),
    (4, "reallocation", ("training_tp=2", "training_pp=2", "zero=1")),
    (4, "reallocation", ("training_tp=2", "offload=true", "recompute=true", "tokens=256")),
]
QUICK = [(2, "separation", ()), (4, "interleaving1", ()), (4, "reallocation", ("training_tp=2",))]
KINDS = ("compute", "waiting", "control")
LARGEST_CONTROL = 0.05  # of an iteration
ITERATIONS, NUM_QUICK = 8, 4


def main(arguments: list[str]) -> int:
    parser = Arguments("strategies", __doc__)
    parser.add_argument("--quick", action="store_true", help="three short cases; judges and writes nothing")
    quick = parser.parse_args(arguments).quick
    rows, drawn, demo = [], {}, []
    with tempfile.TemporaryDirectory() as folder:
        for num_ranks, name, options in QUICK if quick else CASES:
            row, records, median = run_case(Path(folder), num_ranks, name, options, NUM_QUICK if quick else ITERATIONS)
            if num_ranks == DRAWN_RANKS:
                note = f"median of all {row['iteration_s']:.2f} s"
                drawn[name] = {"note": note, "records": of_iterations(records, [median])}
            elif (num_ranks, name, options) == DEMO:
                demo = of_iterations(records, sorted({span[4] for span in records[0]["spans"]})[-2:])
            rows.append(row)
            print(f"{num_ranks} ranks, {name} {' '.join(options)}: {row['iteration_s']:.2f} s", flush=True)
    if quick:
        return ended("strategies", rows, ok=True)
    about = f"Measured ({provenance()['hardware']}): the embedded model, the median iteration of each run."
    found = {"kind": "measured", "about": about, "strategies": drawn, "demo": demo}
    path = write("strategies", rows).with_name(TIMELINES.name)
    path.write_text(json.dumps(found) + "\n", encoding="utf-8")
    return ended("strategies", rows)


def run_case(
    folder: Path, num_ranks: int, name: str, options: tuple[str, ...], iterations: int = ITERATIONS
) -> tuple[dict, list[dict], int]:
    """Runs the program once. Returns the row, what its timeline recorded, and the number of its median iteration."""
    words = [f"iterations={iterations}", "num_samples=0", *(f"strategy.{option}" for option in options)]
    command, cluster = ["--runs", str(folder), *strategy_words(name, folder)], Cluster.parse(f"1x{num_ranks}")
    if name == "heterogeneous":
        cluster = read_cluster(str(folder / "cluster.toml"))
    result, metrics = train(num_ranks, [*command, *words])
    records = read_chrome(Path(result["run_dir"]) / "timeline.json")
    config = presets.load("tiny", words)
    program = load_strategy(name).compile(make_workload(config), cluster, config.strategy)
    split = any((layout.pp, layout.tp) != (1, 1) for layout in program.placement.layouts.values())
    parts: dict[str, float | None] = dict.fromkeys(KINDS)
    # inside a call that several ranks share, the timeline does not tell computing from waiting
    if not split and not program.chains:
        parts |= mean_shares(lanes(records), program)
    static = [static_bytes(program, rank) for rank in cluster.ranks]
    row = {
        "bench": "strategies",
        "ranks": num_ranks,
        "strategy": name,
        "options": " ".join(options),
        "iteration_s": statistics.median(row["iteration_s"] for row in metrics[1:]),
        "gen_tokens_per_s": statistics.median(row["gen_tokens_per_s"] for row in metrics[1:]),
        "moved_bytes": metrics[-1]["moved_bytes"],
        "moved_messages": metrics[-1]["moved_messages"],
        "static_bytes": max(sum(kinds.values()) for kinds in static),
        **{f"{kind}_share": share for kind, share in parts.items()},
        "ok": parts["control"] is None or parts["control"] <= LARGEST_CONTROL,
    }
    return row, records, median_iteration(records, [one["iteration_s"] for one in metrics])


def median_iteration(records: list[dict], seconds: list[float]) -> int:
    """Returns, of the iterations that a timeline has, the one nearest to the median of all.

    seconds: of each iteration.
    """
    recorded = {span[4] for record in records for span in record["spans"]}
    middle = statistics.median(seconds[1:])
    return min(sorted(recorded), key=lambda number: abs(seconds[number] - middle))


def of_iterations(records: list[dict], numbers: list[int]) -> list[dict]:
    """Returns the spans of some iterations; seconds since the first, to a microsecond."""
    chosen = [[span for span in record["spans"] if span[4] in numbers] for record in records]
    first_s = min(span[2] for spans in chosen for span in spans)
    return [
        {**record, "spans": [[*span[:2], *(round(s - first_s, 6) for s in span[2:4]), span[4], {}] for span in spans]}
        for record, spans in zip(records, chosen, strict=True)
    ]


# ---- where the time goes ---------------------------------------------------------------------------------------------


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
