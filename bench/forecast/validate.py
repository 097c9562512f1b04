"""The simulator against published measurements: seconds of a PPO iteration, forecast and measured, per row.

The rows are ReaL's (arXiv 2406.14088; bench/data/README.md). Each system is a placement of this project, compiled and
simulated (bench/forecast/validate_systems.py). The plan of ReaL-Heuristic is fully known, and four physical constants
(bench/data/real_v1.json) are fitted to its rows together, none per row or per model. The other systems are forecast
with the same constants; of them, what counts is which runs are faster than which.
"""

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.forecast.validate_systems import SYSTEMS, fastest
from bench.rows import write
from rlhf_spmd.algorithm import load_algorithm
from rlhf_spmd.calibration_file import read_calibration
from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.cost.simulate import Forecast
from rlhf_spmd.plan.workload import ModelShape, Workload

DATA = Path(__file__).parents[1] / "data"
SHAPES = {  # billions of parameters -> LLaMA-2 and CodeLLaMA as ReaL counts them (vocabulary 32,000, full heads)
    "7": ModelShape(32, 4096, 11008, 32, 32, 128, 32000),
    "13": ModelShape(40, 5120, 13824, 40, 40, 128, 32000),
    "34": ModelShape(48, 8192, 22016, 64, 64, 128, 32000),
    "70": ModelShape(80, 8192, 28672, 64, 64, 128, 32000),
}
MODELS = {"actor": "actor_b", "critic": "critic_b", "reference": "ref_b", "reward": "reward_b"}  # their columns
COLUMNS = (*MODELS.values(), "prompt_len", "gen_len", "batch", "n_gpus", "system", "sec_per_iter")
MINI_BATCHES, DEVICES = 4, 8  # of an iteration, of a node
MEAN_ERROR, WORST_ERROR = 0.06, 0.12  # promised of the system to which the constants were fitted
FITTED = "ReaL-Heuristic"
CORRELATION = 0.9  # of ranks, promised of all rows


def workload_of(row: Mapping[str, str]) -> Workload:
    """The workload that a row describes."""
    batch, recomputes = int(row["batch"]), SYSTEMS[row["system"]].recomputes
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


def forecast_row(row: Mapping[str, str], calibration: Calibration) -> tuple[Forecast, str]:
    """One iteration of a row with a known system, and in which configuration. Raises UserError if none fits."""
    cluster = Cluster.parse(f"{int(row['n_gpus']) // DEVICES}x{DEVICES}", "a100-80g")
    return fastest(row["system"], workload_of(row), cluster, calibration)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a file that were measured. Raises UserError naming the file and what is wrong in it."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a .csv file") from None
    lacking = [name for name in COLUMNS if not rows or name not in rows[0]]
    if lacking:
        raise UserError(f"{path} has no rows, or lacks columns: {', '.join(lacking)}")
    for number, row in enumerate(rows, start=2):
        unknown = [row[name] for name in COLUMNS[:4] if row[name] not in SHAPES]
        if unknown:
            raise UserError(f"{path}, line {number}: no model of {unknown[0]} billion; known: {', '.join(SHAPES)}")
        try:
            whole = [int(row[name]) for name in ("prompt_len", "gen_len", "batch", "n_gpus")]
            positive = min(*whole, 1 if row["sec_per_iter"] == "NA" else float(row["sec_per_iter"])) > 0
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
        if not positive or whole[3] % DEVICES or whole[2] % MINI_BATCHES:
            raise UserError(
                f"{path}, line {number}: lengths and seconds must be positive, n_gpus a multiple of {DEVICES}, "
                f"batch one of {MINI_BATCHES}"
            )
    return [row for row in rows if row["sec_per_iter"] != "NA"]


def judged(row: dict[str, str], calibration: Calibration) -> dict:
    """A row with its forecast, which is also printed. Raises UserError if there is none."""
    found, plan = forecast_row(row, calibration)
    found_s, published_s = found.makespan_s, float(row["sec_per_iter"])
    error = found_s / published_s - 1
    models = f"actor {row['actor_b']}B, critic {row['critic_b']}B, {row['n_gpus']} GPUs, {row['gen_len']} new tokens"
    seconds = f"{found_s:6.1f} s, published {published_s:5.1f} s, {error:+7.1%}"
    print(f"{row['system']:<15} {models:<54} {seconds}  {plan}", flush=True)
    return {name: row[name] for name in COLUMNS} | {"forecast_s": found_s, "error": error, "plan": plan}


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The correlation of ranks, equal values sharing their mean rank. None for fewer than two different values."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[place]

    if min(len(set(first)), len(set(second))) < 2:
        return None
    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def summary(results: list[dict]) -> dict:
    """Errors by system, the correlation of all rows, and whether what the README promises holds of these rows."""
    systems = {}
    for name in dict.fromkeys(row["system"] for row in results):
        errors = [abs(row["error"]) for row in results if row["system"] == name]
        systems[name] = {"mean_abs_error": sum(errors) / len(errors), "worst_abs_error": max(errors)}
    found = spearman(*([float(row[key]) for row in results] for key in ("forecast_s", "sec_per_iter")))
    ok = bool(systems) and (found is None or found >= CORRELATION)
    if FITTED in systems:
        ok &= systems[FITTED]["mean_abs_error"] <= MEAN_ERROR and systems[FITTED]["worst_abs_error"] <= WORST_ERROR
    return {"bench": "validate", "systems": systems, "spearman": found, "ok": bool(ok)}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench validate", description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=Path, metavar="FILE.csv", help="other rows with the same columns; not recorded")
    parsed = parser.parse_args(arguments)
    calibration = read_calibration(str(DATA / "real_v1.json"))
    try:
        rows = read_rows(parsed.rows or DATA / "realhf_v1_scale_actor.csv")
    except UserError as error:
        parser.error(str(error))
    results = []
    for row in rows:
        try:
            results += [judged(row, calibration)] if row["system"] in SYSTEMS else []
        except UserError as error:
            print(f"left out: {error}")
    unknown = sorted({row["system"] for row in rows} - SYSTEMS.keys())
    if unknown:
        print(f"left out, since their placements are not known: {', '.join(unknown)}")
    result = summary(results)
    for name, errors in result["systems"].items():
        print(f"{name}: mean error {errors['mean_abs_error']:.1%}, worst {errors['worst_abs_error']:.1%}")
    if result["spearman"] is not None:
        print(f"correlation of ranks, all rows: {result['spearman']:.3f}")
    if parsed.rows is None:
        write("validate", [{"bench": "validate"} | row for row in results])
    print(json.dumps(result))
    return 0 if result["ok"] else 1
