"""Prints the constants of bench/data/real_v1.json, fitted to published seconds of ReaL-Heuristic and of ReaL's plans.

The placements of the former are known; the planner finds those of the latter with the constants at hand, and constants
and plans are found in turns. A fit is least squares of the logarithm of forecast / published (Gauss-Newton, with one
numerical derivative for a few steps), all constants for all rows together. Rows with HELD_OUT new tokens are left out.

Cost: ten minutes. Command: python -m tools fit-published
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log

import numpy as np

from bench.forecast.spaces import reals_space
from bench.forecast.validate import BASE, DATA, DEVICE, HELD_OUT, SEARCHED, cluster_of, read_rows, searched, workload_of
from bench.forecast.validate_systems import SYSTEMS
from rlhf_spmd.machines.calibration_file import read_calibration
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Program

OF_DEVICE = ("matrix_flops", "layer_s", "decode_layer_s", "decode_reduce_s")
CONSTANTS = (*OF_DEVICE, "inside.bytes_per_s")
TURNS, STEPS = 4, 3
DAMPING, STEP = 0.05, 0.03  # of a step of the fit; the relative change of a numerical derivative


def with_constants(calibration: Calibration, values: Sequence[float]) -> Calibration:
    """Returns a calibration with these CONSTANTS."""
    *of_device, rate = map(float, values)
    device = replace(calibration.devices[DEVICE], **dict(zip(OF_DEVICE, of_device, strict=True)))
    return replace(calibration, devices={DEVICE: device}, inside=replace(calibration.inside, bytes_per_s=rate))


def constants_of(calibration: Calibration) -> np.ndarray:
    device = calibration.devices[DEVICE]
    return np.array([*(getattr(device, name) for name in OF_DEVICE), calibration.inside.bytes_per_s])


def program_of(row: Mapping[str, str], calibration: Calibration) -> Program:
    """Returns the program of a row: the heuristic plan, or what the planner finds with a calibration."""
    workload, cluster = workload_of(row), cluster_of(row)
    if row["system"] == BASE:
        placement = next(SYSTEMS[BASE].plans(workload, cluster)).placement
        return compile_program(workload, placement, cluster)
    return searched(workload, cluster, calibration, reals_space(workload)).program


def errors(rows: Sequence[Mapping[str, str]], programs: Sequence[Program], calibration: Calibration) -> np.ndarray:
    """Returns the logarithm of forecast / published seconds of each row."""
    return np.array(
        [
            log(forecast(program, calibration).makespan_s / float(row["sec_per_iter"]))
            for row, program in zip(rows, programs, strict=True)
        ]
    )


def elasticities(
    rows: Sequence[Mapping[str, str]], programs: Sequence[Program], calibration: Calibration
) -> np.ndarray:
    """Returns, per row and constant, by how many percent the seconds grow with a percent more of the constant."""
    before, values = errors(rows, programs, calibration), constants_of(calibration)
    columns = []
    for at in range(len(values)):
        more = values.copy()
        more[at] *= 1 + STEP
        columns.append((errors(rows, programs, with_constants(calibration, more)) - before) / log(1 + STEP))
    return np.array(columns).T


def fitted(rows: Sequence[Mapping[str, str]], programs: Sequence[Program], calibration: Calibration) -> Calibration:
    """Returns the calibration whose constants fit these programs best."""
    slopes = elasticities(rows, programs, calibration)
    damped = np.vstack([slopes, DAMPING * np.eye(len(CONSTANTS))])
    for _ in range(STEPS):
        wrong = errors(rows, programs, calibration)
        change = np.linalg.lstsq(damped, np.concatenate([-wrong, np.zeros(len(CONSTANTS))]), rcond=None)[0]
        calibration = with_constants(calibration, constants_of(calibration) * np.exp(np.clip(change, -0.5, 0.5)))
    return calibration


def main(arguments: list[str]) -> int:
    """Prints the constants, and the rows on which each hangs."""
    assert not arguments, "fit-published takes no options"
    calibration = read_calibration(str(DATA / "real_v1.json"))
    rows = [row for row in read_rows() if row["system"] in (BASE, SEARCHED)]
    used = [row for row in rows if row["gen_len"] != HELD_OUT]
    for turn in range(TURNS):
        programs = [program_of(row, calibration) for row in used]
        calibration = fitted(used, programs, calibration)
        wrong = np.abs(np.expm1(errors(used, programs, calibration)))
        values = ", ".join(f"{name} {one:.4g}" for name, one in zip(CONSTANTS, constants_of(calibration), strict=True))
        print(f"turn {turn + 1}: mean error {wrong.mean():.1%}, worst {wrong.max():.1%}: {values}", flush=True)
    slopes = elasticities(used, programs, calibration)
    print("percent of the seconds of a row for a percent of a constant")
    for row, of_row in zip(used, slopes, strict=True):
        about = f"{row['system']:<15} {row['actor_b']:>3}B, {row['gen_len']} new tokens"
        print(about, "  ".join(f"{name} {one:+.2f}" for name, one in zip(CONSTANTS, of_row, strict=True)))
    found = dict(zip(CONSTANTS, map(float, constants_of(calibration)), strict=True))
    print(json.dumps({"tool": "fit-published", "constants": found, "mean_error": float(wrong.mean()), "ok": True}))
    return 0
