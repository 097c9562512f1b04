"""The embedded model under each strategy: seconds per iteration, how busy the ranks are, the control plane's share.

At 4 ranks, as the demo runs, and at 2, where each rank has a core to itself on two cores. Draws one iteration of each
at 2 ranks to one scale.

Cost: five minutes on two cores. Command: python -m bench strategies
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from bench.rows import RESULTS, train, write
from bench.shares import shares
from rlhf_spmd import config as configs
from rlhf_spmd.config import make_workload
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.strategy import load_strategy

STRATEGIES = ("flattening", "interleaving1", "interleaving2", "separation")
RANKS = (2, 4)
DRAWN_RANKS = 2
LARGEST_CONTROL = 0.05  # of an iteration
ITERATIONS = 8


def main(arguments: list[str]) -> int:
    from rlhf_spmd.runtime.timeline import write_png
    from rlhf_spmd.runtime.trace import lanes, read_chrome

    argparse.ArgumentParser(prog="bench strategies", description=__doc__).parse_args(arguments)
    rows, drawn = [], {}
    print("ranks  strategy        iteration s  computing  waiting  control")
    with tempfile.TemporaryDirectory() as runs:
        for num_ranks in RANKS:
            for name in STRATEGIES:
                options = [f"iterations={ITERATIONS}", "num_samples=0"]
                result, metrics = train(num_ranks, ["--runs", runs, "--strategy", name, *options])
                records = read_chrome(Path(result["run_dir"]) / "timeline.json")
                if num_ranks == DRAWN_RANKS:
                    drawn[name] = records
                workload = make_workload(configs.load("tiny", options))
                program = load_strategy(name).compile(workload, Cluster.parse(f"1x{num_ranks}"), {})
                found = shares(lanes(records), program)
                total_s = sum(row["total_s"] for row in found)
                parts = {kind: sum(row[f"{kind}_s"] for row in found) / total_s for kind in KINDS}
                row = {
                    "bench": "strategies",
                    "ranks": num_ranks,
                    "strategy": name,
                    "iteration_s": statistics.median(row["iteration_s"] for row in metrics[1:]),
                    "gen_tokens_per_s": statistics.median(row["gen_tokens_per_s"] for row in metrics[1:]),
                    "moved_bytes": metrics[-1]["moved_bytes"],
                    "moved_messages": metrics[-1]["moved_messages"],
                    **{f"{kind}_share": share for kind, share in parts.items()},
                    "ok": parts["control"] <= LARGEST_CONTROL,
                }
                rows.append(row)
                words = "  ".join(f"{100 * parts[kind]:8.1f}%" for kind in KINDS)
                print(f"{num_ranks:5}  {name:<14}  {row['iteration_s']:11.2f}  {words}", flush=True)
    width_s = max(_length_s(records) for records in drawn.values())
    for name, records in drawn.items():
        title = f"{name} on {DRAWN_RANKS} ranks"
        write_png(RESULTS / f"timeline_{name}.png", records, title=title, num_iterations=1, width_s=width_s)
    write("strategies", rows)
    ok = all(row["ok"] for row in rows)
    print(json.dumps({"bench": "strategies", "ok": ok}))
    return 0 if ok else 1


KINDS = ("compute", "waiting", "control")


def _length_s(records: list[dict]) -> float:
    """Seconds of the last iteration."""
    last = max(span[4] for record in records for span in record["spans"])
    spans = [span for record in records for span in record["spans"] if span[4] == last]
    return max(span[3] for span in spans) - min(span[2] for span in spans)
