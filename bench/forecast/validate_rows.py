"""Published rows of RLHF systems: the files that hold them, and the workload and the devices that a row describes."""

import csv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from bench.forecast.validate_systems import SYSTEMS
from rlhf_spmd.pages.algorithm import load_algorithm
from rlhf_spmd.plan.cluster import Cluster
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
