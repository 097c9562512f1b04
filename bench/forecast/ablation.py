"""What each freedom of a plan gains, one after another in ReaL's order: a heuristic plan, a layout for each call, ranks
for each call, host memory for frozen models, CUDA graphs; then what only this planner considers.

The heuristic plan is that of ReaL-Heuristic (validate_systems.py), but all models stay on the devices until offloading
is added. Up to CUDA graphs the planner keeps to ReaL's space (spaces.py), so each step has all placements of the one
before. Models, batches and constants are those of ReaL's published runs (bench/data); the last two have its largest
cluster, for which it published no seconds. CUDA graphs are taken to start decode steps in no time, which is their best
case.

Cost: ten minutes. Command: python -m bench ablation
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

from bench.forecast.spaces import both, kept_on_devices, on_all_ranks, reals_space
from bench.forecast.validate_rows import DATA, ROWS, SEARCHED, cluster_of, read_rows, workload_of
from bench.forecast.validate_searched import BASE, text_of
from bench.forecast.validate_systems import real_heuristic
from bench.rows import write
from rlhf_spmd.machines.calibration_file import read_calibration
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.proof.memory_check import memory
from rlhf_spmd.plan.search.candidates import Allowed, anything
from rlhf_spmd.plan.search.planner import BUDGET, search
from rlhf_spmd.plan.workload import Workload

CASES = tuple(  # actor, critic (billions of parameters), devices, new tokens, batch
    (*models, *lengths)
    for models in (("7", "7", "8"), ("70", "7", "64"), ("70", "70", "128"))
    for lengths in (("128", "512"), ("896", "128"))
)
HEURISTIC, GRAPHS = "heuristic plan", "CUDA graphs"
LONG_BUDGET, KEEP = 6 * BUDGET, 5  # of each search, which is exact; plans that are simulated
SLACK = 0.01  # by which a step may be slower than the one before: the search looks for the least call-level seconds


def case_row(actor: str, critic: str, num_devices: str, new_tokens: str, batch: str) -> dict[str, str]:
    """A case as a row of the published data."""
    models = {"actor_b": actor, "critic_b": critic, "ref_b": actor, "reward_b": critic}
    return models | {
        "prompt_len": "128",
        "gen_len": new_tokens,
        "batch": batch,
        "n_gpus": num_devices,
        "system": SEARCHED,
    }


def steps(workload: Workload) -> Iterator[tuple[str, Allowed, bool]]:
    """(what is added, the layouts that are then allowed, whether decoding uses CUDA graphs) behind the heuristic."""
    space = reals_space(workload)
    yield "a layout for each call", both(both(space, kept_on_devices), on_all_ranks), False
    yield "ranks for each call", both(space, kept_on_devices), False
    yield "offloading", space, False
    yield GRAPHS, space, True
    yield "this planner's space", anything, True


def with_graphs(calibration: Calibration) -> Calibration:
    """The constants of machines that start a decode step in no time."""
    devices = {name: replace(device, graph_layer_s=0.0) for name, device in calibration.devices.items()}
    return replace(calibration, devices=devices)


def heuristic(workload: Workload, cluster: Cluster) -> Placement:
    """ReaL-Heuristic's plan, with all models on the devices."""
    (plan,) = real_heuristic(workload, cluster)
    return Placement({name: replace(layout, offload=False) for name, layout in plan.placement.layouts.items()})


def case_rows(row: Mapping[str, str], calibration: Calibration) -> Iterator[dict]:
    """A row for each step of a case."""
    workload, cluster = workload_of(row), cluster_of(row)
    program = compile_program(workload, heuristic(workload, cluster), cluster)
    found = forecast(program, calibration)
    about = {name: row[name] for name in ("actor_b", "critic_b", "n_gpus", "gen_len", "batch")}
    yield about | {
        "step": HEURISTIC,
        "forecast_s": found.makespan_s,
        "plan": text_of(program.placement),
        "fits": not memory(program),
    }
    for step, allowed, graphs in steps(workload):
        constants = with_graphs(calibration) if graphs else calibration
        found = search(workload, cluster, constants, keep=KEEP, budget=LONG_BUDGET, allowed=allowed)
        plan = found.plans[0]
        offloaded = [name for name, layout in plan.placement.layouts.items() if layout.offload]
        words = f"{text_of(plan.placement)}{'; streams' if plan.placement.stream else ''}"
        words += f"; offloaded: {', '.join(offloaded)}" if offloaded else ""
        yield about | {
            "step": step,
            "forecast_s": plan.forecast.makespan_s,
            "plan": words,
            "fits": True,
            "gap": found.gap,
        }


def with_gains(rows: list[dict], published: Mapping[tuple[str, ...], float]) -> list[dict]:
    """The rows of a case with `gain`, the share by which a step shortens the iteration of the step before, `faster`,
    how many times as fast as the heuristic plan it is, and `published_s`, ReaL's seconds of that step or None."""
    base, before, found = rows[0], rows[0], []
    for row in rows:
        gain = {"gain": 1 - row["forecast_s"] / before["forecast_s"], "faster": base["forecast_s"] / row["forecast_s"]}
        system = {HEURISTIC: BASE, "offloading": SEARCHED}.get(row["step"], "")
        key = (row["actor_b"], row["critic_b"], row["n_gpus"], row["gen_len"], system)
        found.append(row | gain | {"published_s": published.get(key)})
        before = row
    return found


def published_s() -> dict[tuple[str, ...], float]:
    """ReaL's seconds by actor, critic, devices, new tokens and system."""
    names = ("actor_b", "critic_b", "n_gpus", "gen_len", "system")
    return {tuple(row[name] for name in names): float(row["sec_per_iter"]) for row in read_rows(ROWS)}


def main(arguments: list[str]) -> int:
    argparse.ArgumentParser(prog="bench ablation", description=__doc__.partition("\n\n")[0]).parse_args(arguments)
    calibration, rows = read_calibration(str(DATA / "real_v1.json")), []
    for case in CASES:
        for row in with_gains(list(case_rows(case_row(*case), calibration)), published_s()):
            rows.append({"bench": "ablation"} | row)
            models = f"{row['actor_b']}B and {row['critic_b']}B on {row['n_gpus']}, {row['gen_len']} new tokens"
            seconds = f"{row['forecast_s']:6.1f} s {row['gain']:+7.1%} {row['faster']:5.2f}"
            print(f"{models:<38} {row['step']:<24} {seconds}  {row['plan']}", flush=True)
    write("ablation", rows)
    ok = all(row["gain"] >= -SLACK for row in rows)
    print(json.dumps({"bench": "ablation", "rows": len(rows), "ok": ok}))
    return 0 if ok else 1
