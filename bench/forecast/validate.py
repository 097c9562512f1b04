"""The simulator against published measurements: seconds of a PPO iteration, forecast and measured, per row.

The rows are ReaL's (arXiv 2406.14088; bench/data/README.md). Each system is a placement of this project, compiled and
simulated (bench/forecast/validate_systems.py). The plan of ReaL-Heuristic is fully known. The plans that ReaL found
were not published, so for its rows the planner searches, in the space that the code of ReaL documents (spaces.py); the
ratio to ReaL-Heuristic for the same row is compared with the published ratio. The plan in the whole space of this
planner stands beside it; it may be faster, because ReaL cannot run it.

`python -m tools fit-published` fits five physical constants (bench/data/real_v1.json) to the rows of these two
together, none per row or per model; it does not use those with HELD_OUT new tokens. The other systems are forecast with
the same constants; of them, what counts is which runs are faster than which.

With --rest, the rows of the figure's other two thirds, where critic and reward model grow, or all models; no constant
or assumption was chosen with them in sight.

Cost: five minutes, ten with --rest, most of it the planner's. Command: python -m bench validate [--rest]
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bench.cells import grouped, number
from bench.forecast.spaces import reals_space
from bench.forecast.validate_systems import SYSTEMS, fastest
from bench.rows import Arguments, write
from bench.tables import ended
from rlhf_spmd.errors import UserError
from rlhf_spmd.machines.calibration_file import read_calibration
from rlhf_spmd.pages.algorithm import load_algorithm
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.cost.seconds import Cost
from rlhf_spmd.plan.search.exact import Best, Space
from rlhf_spmd.plan.search.iteration_model import CallModel
from rlhf_spmd.plan.search.planner import NUM_CHAINED, Plan, search, simulated, two_phase, two_phase_in_chain
from rlhf_spmd.plan.workload import ModelShape, Workload

DATA = Path(__file__).parents[1] / "data"
ROWS = DATA / "realhf_v1_scale_actor.csv"
REST = DATA / "realhf_v1_rest.csv"  # the other two thirds of the figure, to which nothing is fitted
SHAPES = {  # billions of parameters -> LLaMA-2 and CodeLLaMA as ReaL counts them (vocabulary 32,000, full heads)
    "7": ModelShape(32, 4096, 11008, 32, 32, 128, 32000),
    "13": ModelShape(40, 5120, 13824, 40, 40, 128, 32000),
    "34": ModelShape(48, 8192, 22016, 64, 64, 128, 32000),
    "70": ModelShape(80, 8192, 28672, 64, 64, 128, 32000),
}
MODELS = {"actor": "actor_b", "critic": "critic_b", "reference": "ref_b", "reward": "reward_b"}  # their columns
COLUMNS = (
    "case",
    *MODELS.values(),
    "prompt_len",
    "gen_len",
    "batch",
    "n_gpus",
    "system",
    "sec_per_iter",
    "pflops_per_s",
)
SETTING = COLUMNS[:-3]  # what the systems have in common
DEVICE = "a100-80g"
MINI_BATCHES, DEVICES = 4, 8  # of an iteration, of a node
HELD_OUT = "384"  # new tokens of the rows to which nothing is fitted
SEARCHED = "ReaL"  # the system whose plans were searched, and not published
METHOD, KEEP = "two_phase", 5  # all rows were made with it
BASE = "ReaL-Heuristic"  # the system that the ratio of searched plans is to
PROMISED = {BASE: (0.06, 0.12), SEARCHED: (0.15, 0.30)}  # mean and worst error
CORRELATION = 0.89  # of ranks, promised of the rows whose plans are known
RATIO_CORRELATION = 0.6  # of ranks, promised of the searched plans' ratios to the heuristic one


# ---- published rows --------------------------------------------------------------------------------------------------


def workload_of(row: Mapping[str, str]) -> Workload:
    """Returns the workload that a row describes."""
    batch, recomputes = int(row["batch"]), row["system"] != SEARCHED and SYSTEMS[row["system"]].recomputes
    shapes = {model: SHAPES[row[column]] for model, column in MODELS.items()}
    for model in ("critic", "reward"):
        shapes[model] = replace(shapes[model], scalar_head=True)
    ppo = load_algorithm("ppo")
    return Workload(
        workflow=ppo.workflow(ppo.options(epochs=1, old_logprobs="recompute" if recomputes else "generator")),
        models=shapes,
        rollout_batch=batch,
        samples_per_prompt=1,
        mini_batch=batch // MINI_BATCHES,
        micro_batch=batch // MINI_BATCHES,
        epochs=1,
        max_prompt=int(row["prompt_len"]),
        max_response=int(row["gen_len"]),
        param_bytes=2,
        max_sequences=batch,
    )


def cluster_of(row: Mapping[str, str]) -> Cluster:
    """Returns the devices of a row. No memory is reserved: ReaL's search has 80 GiB for a plan, and the systems' own
    reserves stand in validate_systems.py."""
    return Cluster.parse(f"{int(row['n_gpus']) // DEVICES}x{DEVICES}", DEVICE).reserving({DEVICE: 0.0})


def read_rows(path: Path = ROWS) -> list[dict[str, str]]:
    """Reads the published rows that were measured."""
    with path.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["sec_per_iter"] != "NA"]


# ---- forecasts of them -----------------------------------------------------------------------------------------------


def searched(workload: Workload, cluster: Cluster, calibration: Calibration) -> Plan:
    """Returns the planner's best plan. Raises UserError if none fits."""
    return search(workload, cluster, calibration, method=METHOD, keep=KEEP).plans[0]


def searched_as_real(workload: Workload, cluster: Cluster, calibration: Calibration) -> Plan:
    """Returns the planner's best plan in ReaL's space. Raises UserError if none fits.

    ReaL's runtime keeps its gradients between steps, so they are counted as bytes that are always there.
    """
    model = CallModel(Cost(calibration, workload, cluster), reals_space(workload))
    candidates = (
        tuple(replace(one, static_bytes=one.static_bytes + one.gradient_bytes, gradient_bytes=0) for one in of)
        for of in Space.of(model).candidates
    )
    space, best = Space(model, tuple(candidates)), Best(KEEP)
    in_chain, chained = Space(model.in_chain(), space.candidates), Best(NUM_CHAINED)
    two_phase(space, best)
    two_phase_in_chain(in_chain, chained, best.choices)
    if not best.found:
        raise UserError("no plan in ReaL's space fits the devices")
    plans = simulated(space, best, METHOD, calibration) + simulated(in_chain, chained, METHOD, calibration)
    return min(plans, key=lambda plan: plan.forecast.makespan_s)


def judged(row: Mapping[str, str], calibration: Calibration, rows: Sequence[dict]) -> dict:
    """Forecasts a row. rows: among which is that of the heuristic plan. Raises UserError if nothing fits."""
    workload, cluster = workload_of(row), cluster_of(row)
    found: dict[str, float | str]
    if row["system"] == SEARCHED:
        plan = searched_as_real(workload, cluster, calibration)
        layouts = plan.placement.layouts.items()
        words = (f"{name} {one.dp}x{one.pp}x{one.tp} at {min(one.ranks)}" for name, one in layouts)
        base_s, found_s = fastest(BASE, workload, cluster, calibration)[0].makespan_s, plan.forecast.makespan_s
        found = {"forecast_s": found_s, "plan": ", ".join(words), "base_s": base_s, "ratio": base_s / found_s}
        found["own_space_s"] = searched(workload, cluster, calibration).forecast.makespan_s
        found["published_ratio"] = published_ratio(row, rows)
    else:
        simulated, name = fastest(row["system"], workload, cluster, calibration)
        found_s = simulated.makespan_s
        found = {"forecast_s": found_s, "plan": name}
    error = found_s / float(row["sec_per_iter"]) - 1
    kept = {name: row[name] for name in COLUMNS}
    return {"bench": "validate", **kept, **found, "error": error, "seconds_are": kind_of(row)}


def published_ratio(row: Mapping[str, str], rows: Sequence[dict]) -> float:
    """Returns how many times faster the searched plan of a row was than the heuristic one."""
    alike = (one for one in rows if one["system"] == BASE and all(one[name] == row[name] for name in SETTING))
    return float(next(alike)["sec_per_iter"]) / float(row["sec_per_iter"])


def kind_of(row: Mapping) -> str:
    """Returns how the constants came to a row: fitted to it, to others of its system (held out), to these and other
    sizes of models (unseen), or to other systems (forecast)."""
    if row["system"] not in PROMISED:
        return "forecast"
    if row["case"] != "scale_actor":
        return "unseen"
    return "held out" if row["gen_len"] == HELD_OUT else "fitted"


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Returns the correlation of ranks; equal values share their mean rank. None: fewer than two different values."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[place]

    if min(len(set(first)), len(set(second))) < 2:
        return None
    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def summary(results: Sequence[dict]) -> dict:
    """Returns errors by system, the correlation of all rows, and whether the README's promises hold of these rows."""
    parts = {"mean_abs_error": "mean abs error", "worst_abs_error": "max abs error"}
    systems = {
        group["system"]: {name: number(field, group) for name, field in parts.items()}
        for group in grouped(results, ["system"])
    }
    known = [row for row in results if row["system"] != SEARCHED]
    found = spearman(*([float(row[key]) for row in known] for key in ("forecast_s", "sec_per_iter")))
    both = [row for row in results if row.get("published_ratio")]
    ratios = spearman(*([row[key] for row in both] for key in ("ratio", "published_ratio")))
    ok = bool(systems) and (found is None or found >= CORRELATION) and (ratios is None or ratios >= RATIO_CORRELATION)
    for name, (mean, worst) in PROMISED.items():
        if name in systems:
            ok &= systems[name]["mean_abs_error"] <= mean and systems[name]["worst_abs_error"] <= worst
    return {"systems": systems, "spearman": found, "spearman_of_ratios": ratios, "ok": bool(ok)}


def main(arguments: list[str]) -> int:
    parser = Arguments("validate", __doc__)
    parser.add_argument("--rest", action="store_true", help="the rows where critics, or all models, grow")
    rest = parser.parse_args(arguments).rest
    calibration, rows = read_calibration(str(DATA / "real_v1.json")), read_rows(REST if rest else ROWS)
    results = [judged(row, calibration, rows) for row in tqdm(rows, unit="row", leave=False)]
    write("validate_rest" if rest else "validate", results)
    return ended("validate", results, **summary(results) | ({"ok": True} if rest else {}))
