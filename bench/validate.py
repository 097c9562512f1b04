"""The simulator against published measurements: seconds of a PPO iteration, forecast and measured, per row.

The rows are ReaL's (arXiv 2406.14088; bench/data/README.md). The plan of ReaL-Heuristic is fully known: every call on
all devices, tp 8, pp = nodes, dp 1, sequence parallel, recomputation, reference and reward in host memory. Here it is a
placement of this project, compiled and simulated. Four physical constants (bench/data/real_v1.json) are fitted to this
system's rows together, none per row or per model.
"""

import argparse
import csv
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from bench.rows import write
from rlhf_spmd.algorithms.ppo import PPO, workflow
from rlhf_spmd.calibration_file import read_calibration
from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.calibration import Calibration
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.compile import compile_program
from rlhf_spmd.plan.forecast import forecast
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.workload import ModelShape, Workload

DATA = Path(__file__).parent / "data"
SHAPES = {  # billions of parameters -> LLaMA-2 and CodeLLaMA as ReaL counts them (vocabulary 32,000, full heads)
    "7": ModelShape(32, 4096, 11008, 32, 32, 128, 32000),
    "13": ModelShape(40, 5120, 13824, 40, 40, 128, 32000),
    "34": ModelShape(48, 8192, 22016, 64, 64, 128, 32000),
    "70": ModelShape(80, 8192, 28672, 64, 64, 128, 32000),
}
MODELS = {"actor": "actor_b", "critic": "critic_b", "reference": "ref_b", "reward": "reward_b"}  # their columns
COLUMNS = (*MODELS.values(), "prompt_len", "gen_len", "batch", "n_gpus", "system", "sec_per_iter")
MINI_BATCHES, DEVICES = 4, 8  # of an iteration, of a node
MEAN_ERROR, WORST_ERROR = 0.06, 0.12  # promised


def workload_of(row: Mapping[str, str]) -> Workload:
    """One iteration as a row describes it."""
    batch = int(row["batch"])
    shapes = {model: SHAPES[row[column]] for model, column in MODELS.items()}
    for model in ("critic", "reward"):
        shapes[model] = replace(shapes[model], scalar_head=True)
    return Workload(
        workflow=workflow(PPO(epochs=1)),
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


def real_heuristic(workload: Workload, cluster: Cluster) -> Placement:
    """Every call on all devices: tp 8, pp = nodes; twice as many micro-batches as stages in training."""
    pp = len(cluster.nodes)
    number = 2 * pp if pp > 1 else 1
    grid = Layout.grid_of(cluster.ranks, pp=pp, tp=8)
    train = replace(grid, micro_batch=workload.mini_batch // number, recompute=True)
    infer = replace(grid, micro_batch=min(workload.num_sequences // pp, workload.mini_batch))
    layouts = {}
    for call in workload.workflow.placed_calls:
        layouts[call.name] = train if call.kind == "train" else infer
        if call.model in ("reference", "reward"):
            layouts[call.name] = replace(infer, offload=True)
    return Placement(layouts)


SYSTEMS = {"ReaL-Heuristic": real_heuristic}


def forecast_s(row: Mapping[str, str], calibration: Calibration) -> float:
    """Seconds of one iteration of a row with a known system."""
    workload, cluster = workload_of(row), Cluster.parse(f"{int(row['n_gpus']) // DEVICES}x{DEVICES}", "a100-80g")
    program = compile_program(workload, SYSTEMS[row["system"]](workload, cluster), cluster)
    return forecast(program, calibration).makespan_s


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
    """A row with its forecast, which is also printed."""
    found_s, published_s = forecast_s(row, calibration), float(row["sec_per_iter"])
    error = found_s / published_s - 1
    models = f"actor {row['actor_b']}B, critic {row['critic_b']}B, {row['n_gpus']} GPUs, {row['gen_len']} new tokens"
    print(f"{row['system']}  {models:<53} {found_s:6.1f} s, published {published_s:5.1f} s, {error:+.1%}", flush=True)
    return {name: row[name] for name in COLUMNS} | {"forecast_s": found_s, "error": error}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench validate", description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=Path, metavar="FILE.csv", help="other rows with the same columns; not recorded")
    parsed = parser.parse_args(arguments)
    calibration = read_calibration(str(DATA / "real_v1.json"))
    try:
        rows = read_rows(parsed.rows or DATA / "realhf_v1_scale_actor.csv")
    except UserError as error:
        parser.error(str(error))
    results = [judged(row, calibration) for row in rows if row["system"] in SYSTEMS]
    left_out = sorted({row["system"] for row in rows} - SYSTEMS.keys())
    if left_out:
        print(f"left out, since their placements are not known: {', '.join(left_out)}")
    systems = {}
    for name in dict.fromkeys(row["system"] for row in results):
        errors = [abs(row["error"]) for row in results if row["system"] == name]
        systems[name] = {"mean_abs_error": sum(errors) / len(errors), "worst_abs_error": max(errors)}
    means, worst = ([one[key] for one in systems.values()] for key in ("mean_abs_error", "worst_abs_error"))
    ok = bool(systems) and max(means) <= MEAN_ERROR and max(worst) <= WORST_ERROR
    if parsed.rows is None:
        write("validate", [{"bench": "validate"} | row for row in results])
    print(json.dumps({"bench": "validate", "systems": systems, "ok": ok}))
    return 0 if ok else 1
