"""The simulator against published measurements: seconds of a PPO iteration, forecast and measured, per row.

The rows are ReaL's (arXiv 2406.14088; bench/data/README.md). Each system is a placement of this project, compiled and
simulated (bench/forecast/validate_systems.py). The plan of ReaL-Heuristic is fully known; for the rows of ReaL, whose
plans are not, the planner searches (validate_searched.py). Five physical constants (bench/data/real_v1.json) are fitted
to the rows of these two together (validate_fit.py), none per row or per model; those with HELD_OUT new tokens are not
used for that. The other systems are forecast with the same constants; of them, what counts is which runs are faster
than which.

Cost: five minutes, most of it the planner's; --fit, which prints the constants instead, ten.
Command: python -m bench validate [--rows FILE.csv | --fit]
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bench.forecast import validate_fit, validate_searched
from bench.forecast.validate_rows import (
    COLUMNS,
    DATA,
    HELD_OUT,
    ROWS,
    SEARCHED,
    SETTING,
    cluster_of,
    read_rows,
    workload_of,
)
from bench.forecast.validate_searched import BASE
from bench.forecast.validate_systems import SYSTEMS, fastest
from bench.rows import write
from rlhf_spmd.errors import UserError
from rlhf_spmd.machines.calibration_file import read_calibration
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.cost.simulate import Forecast

PROMISED = {BASE: (0.06, 0.12), SEARCHED: (0.15, 0.30)}  # mean and worst error
CORRELATION = 0.9  # of ranks, promised of the rows whose plans are known
RATIO_CORRELATION = 0.6  # of ranks, promised of the searched plans' ratios to the heuristic one


def forecast_row(row: Mapping[str, str], calibration: Calibration) -> tuple[Forecast, str]:
    """One iteration of a row with a known system, and in which configuration. Raises UserError if none fits."""
    return fastest(row["system"], workload_of(row), cluster_of(row), calibration)


def judged(
    row: dict[str, str], calibration: Calibration, rows: Sequence[dict[str, str]] = (), *, own_space: bool = False
) -> dict:
    """A row with its forecast, which is also printed. rows: among which that of the heuristic plan may be. own_space:
    search the planner's own space, too. Raises UserError if there is no forecast."""
    if row["system"] == SEARCHED:
        found = validate_searched.row_of(workload_of(row), cluster_of(row), calibration, own_space=own_space)
        found["published_ratio"] = validate_searched.published_ratio(row, rows, SETTING)
    else:
        simulated, plan = forecast_row(row, calibration)
        found = {"forecast_s": simulated.makespan_s, "plan": plan}
    found_s, published_s = found["forecast_s"], float(row["sec_per_iter"])
    error = found_s / published_s - 1
    models = f"actor {row['actor_b']}B, critic {row['critic_b']}B, {row['n_gpus']} GPUs, {row['gen_len']} new tokens"
    seconds = f"{found_s:6.1f} s, published {published_s:5.1f} s, {error:+7.1%}"
    print(f"{row['system']:<15} {models:<54} {seconds}  {_about(found)}", flush=True)
    return {name: row[name] for name in COLUMNS} | found | {"error": error}


def _about(found: Mapping) -> str:
    """The plan; of a searched one, how many times faster than the heuristic it is."""
    if "ratio" not in found:
        return found["plan"]
    published = f" (published {found['published_ratio']:.2f})" if found["published_ratio"] else ""
    own = f"; {found['own_space_s']:.1f} s in our space" if "own_space_s" in found else ""
    return f"{found['ratio']:.2f} times as fast as {BASE}{published}{own}"


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The correlation of ranks, equal values sharing their mean rank. None for fewer than two different values."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[place]

    if min(len(set(first)), len(set(second))) < 2:
        return None
    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def kind_of(row: Mapping) -> str:
    """How the constants came to a row: fitted to it, to others of its system (held out), or to other systems."""
    if row["system"] not in PROMISED:
        return "forecast"
    return "held out" if row["gen_len"] == HELD_OUT else "fitted"


def summary(results: list[dict]) -> dict:
    """Errors by system, the correlation of all rows, and whether what the README promises holds of these rows."""
    systems = {}
    for name in dict.fromkeys(row["system"] for row in results):
        errors = [abs(row["error"]) for row in results if row["system"] == name]
        systems[name] = {"mean_abs_error": sum(errors) / len(errors), "worst_abs_error": max(errors)}
    known = [row for row in results if row["system"] != SEARCHED]
    found = spearman(*([float(row[key]) for row in known] for key in ("forecast_s", "sec_per_iter")))
    both = [row for row in results if row.get("published_ratio")]
    ratios = spearman(*([row[key] for row in both] for key in ("ratio", "published_ratio")))
    ok = bool(systems) and (found is None or found >= CORRELATION) and (ratios is None or ratios >= RATIO_CORRELATION)
    for name, (mean, worst) in PROMISED.items():
        if name in systems:
            ok &= systems[name]["mean_abs_error"] <= mean and systems[name]["worst_abs_error"] <= worst
    return {"bench": "validate", "systems": systems, "spearman": found, "spearman_of_ratios": ratios, "ok": bool(ok)}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench validate", description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=Path, metavar="FILE.csv", help="other rows with the same columns; not recorded")
    parser.add_argument("--fit", action="store_true", help="fit the constants anew, print them and what hangs on them")
    parsed = parser.parse_args(arguments)
    calibration = read_calibration(str(DATA / "real_v1.json"))
    if parsed.fit:
        return validate_fit.main(calibration)
    try:
        rows = read_rows(parsed.rows or ROWS)
    except UserError as error:
        parser.error(str(error))
    results, known = [], {*SYSTEMS, SEARCHED}
    for row in rows:
        try:
            results += [judged(row, calibration, rows, own_space=parsed.rows is None)] if row["system"] in known else []
        except UserError as error:
            print(f"left out: {error}")
    unknown = sorted({row["system"] for row in rows} - known)
    if unknown:
        print(f"left out, since their placements are not known: {', '.join(unknown)}")
    result = summary(results)
    for name, errors in result["systems"].items():
        print(f"{name}: mean error {errors['mean_abs_error']:.1%}, worst {errors['worst_abs_error']:.1%}")
    if result["spearman"] is not None:
        print(f"correlation of ranks, rows of known plans: {result['spearman']:.3f}")
    if result["spearman_of_ratios"] is not None:
        print(f"correlation of ranks, ratios of searched to heuristic plans: {result['spearman_of_ratios']:.3f}")
    if parsed.rows is None:
        write("validate", [{"bench": "validate"} | row | {"seconds_are": kind_of(row)} for row in results])
    print(json.dumps(result))
    return 0 if result["ok"] else 1
