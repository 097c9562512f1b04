"""How long planning takes on one core: programs of 1,024 ranks from layouts to forecast, searches for 8x8 and 128x8.

LLaMA-2 70B models, calibration a100-80g, processor seconds. The search is exact in the call-level model, with a proof;
compiling and simulating the best plans is shown apart. The methods of the planner are then compared from 8 to 1,024
devices (plan_methods.py).

Cost: two minutes, and ten for the methods.
Command: python -m bench plan-speed [--part promised | methods] [--layout NxG]
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial

from bench.forecast import plan_methods
from bench.rows import RESULTS, read_rows, write
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.proof.check import check
from rlhf_spmd.plan.search.planner import search

DEVICE, PRESET = "a100-80g", "llama-70b"
RANKS = "128x8"
WORDS = ("rollout_batch=4096", "mini_batch=1024")  # a row in each mini-batch for each of 1,024 ranks
STRATEGIES = {
    "flattening": {"zero": 3},
    "separation": {"generation_tp": 8, "training_tp": 8, "training_pp": 8, "zero": 1},
    "reallocation": {"generation_tp": 4, "training_tp": 8, "training_pp": 4, "zero": 1},
}
PROGRAM_S = 5.0  # promised of a program of 1,024 ranks
SEARCH_S = {"8x8": 2.0, RANKS: 30.0}  # promised of a search
KEEP = {"8x8": 20, RANKS: 2}  # plans that are simulated, which is shown apart; of 1,024 ranks each takes ten seconds


def timed(work: Callable) -> tuple[float, object]:
    """Processor seconds, and the result."""
    began = time.process_time()
    found = work()
    return time.process_time() - began, found


def program_row(strategy: str) -> dict:
    """Seconds of a program from its layouts to its forecast."""
    workload = make_workload(presets.load(PRESET, WORDS))
    cluster, calibration = Cluster.parse(RANKS, DEVICE), load_calibration(DEVICE)
    placement = load_strategy(strategy).place(workload, cluster, **STRATEGIES[strategy])
    compile_s, program = timed(lambda: compile_program(workload, placement, cluster))
    check_s, _ = timed(lambda: check(program))
    simulate_s, found = timed(lambda: forecast(program, calibration))
    whole_s = compile_s + check_s + simulate_s
    row = {"what": f"program, {strategy}", "layout": RANKS, "compile_s": compile_s, "check_s": check_s}
    row |= {"simulate_s": simulate_s, "seconds": whole_s, "promised_s": PROGRAM_S, "ok": whole_s <= PROGRAM_S}
    return row | {"forecast_s": found.makespan_s}


def search_row(layout: str) -> dict:
    """Processor seconds of a search, and seconds of simulating what it found."""
    words = WORDS if layout == RANKS else ()
    workload = make_workload(presets.load(PRESET, words))
    cluster, calibration = Cluster.parse(layout, DEVICE), load_calibration(DEVICE)
    found = search(workload, cluster, calibration, keep=KEEP[layout])
    row = {"what": "search, exact", "layout": layout, "seconds": found.processor_s, "simulate_s": found.simulate_s}
    row |= {"gap": found.gap, "num_plans": len(found.plans), "forecast_s": found.plans[0].forecast.makespan_s}
    return row | {"promised_s": SEARCH_S[layout], "ok": found.processor_s <= SEARCH_S[layout]}


def promised() -> bool:
    """Programs and searches of which a time is promised: are they within it?"""
    cases = [partial(program_row, name) for name in STRATEGIES] + [partial(search_row, name) for name in SEARCH_S]
    rows = []
    for case in cases:
        rows.append({"bench": "plan-speed"} | case())
        row = rows[-1]
        print(
            f"{row['what']:<22} {row['layout']:>6}  {row['seconds']:6.2f} s, promised {row['promised_s']:g}", flush=True
        )
    write("plan_speed", rows)
    return all(row["ok"] for row in rows)


def methods(layouts: Sequence[str]) -> bool:
    """The methods side by side: did each find a placement wherever another one did? Rows of other layouts are kept."""
    path, rows = RESULTS / "plan_methods.jsonl", []
    if path.exists():
        rows = [row for row in read_rows(path) if row["layout"] not in layouts]
    for row in plan_methods.method_rows(layouts):
        rows.append({"bench": "plan-speed"} | row)
        far = "-" if row["distance"] is None else f"{row['distance']:.2%}"
        print(f"{row['method']:<12} {row['layout']:>6}  {row['processor_s']:6.1f} s, {far} from the best", flush=True)
    write("plan_methods", sorted(rows, key=lambda row: row["devices"]))
    return all(row["distance"] is not None for row in rows if row["method"] != plan_methods.APP)


def main(arguments: list[str]) -> int:
    layouts = [layout for _, layout in plan_methods.FAMILY]
    parser = argparse.ArgumentParser(prog="bench plan-speed", description=__doc__.partition("\n")[0])
    parser.add_argument("--part", choices=("promised", "methods"), help="without it, both")
    parser.add_argument("--layout", choices=layouts, help="the methods on this one only; the rows of others are kept")
    parsed = parser.parse_args(arguments)
    found = {}
    if parsed.part != "methods":
        found["promised"] = promised()
    if parsed.part != "promised":
        found["methods"] = methods([parsed.layout] if parsed.layout else layouts)
    print(json.dumps({"bench": "plan-speed", **found, "ok": all(found.values())}))
    return 0 if all(found.values()) else 1
