"""DeepSpeed-Chat's published table against its forecast: hours of an epoch of OPT models with a critic of 350M.

The table is in the README of DeepSpeed-Chat (A100-80G; 8 and 64 GPUs), the settings on the page about its benchmark and
in its scripts: prompts and responses of 256 tokens, one PPO epoch, one optimizer step for each generated batch, the
largest batch that fits and at most 1,024 rows, the hybrid engine, LoRA from 13B on. Nothing is fitted to these rows.

README and page contradict each other about the epoch: 131.9 thousand pairs, or 264,292 samples of 512 tokens. Both name
135 million tokens, which are those of 264,292; so a row has both errors.

OPT's MLP has two matrices of h x 4h, ours three; an intermediate size of 8h / 3 gives the same weights and products.

Cost: 20 seconds. Command: python -m bench published-hours
"""

import argparse
import json
from dataclasses import replace

from bench.baseline_tables import DEEPSPEED_CHAT
from bench.forecast.baselines import Setup, baseline_forecast, recomputing, setups
from bench.forecast.scan import phase_s
from bench.rows import write
from bench.tables import text_table
from rlhf_spmd.machines.calibration_file import NETWORKS, load_calibration
from rlhf_spmd.pages.algorithm import load_algorithm
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.simulate import Forecast
from rlhf_spmd.plan.workload import ModelShape, Workload

DEVICE, MOST_ROWS, TOKENS = "a100-80g", 1024, 256
PAIRS = {"README": 131_900, "benchmark page": 264_292}
HOURS = {  # model -> GPUs -> published hours
    "opt-6.7b": {8: 4.1, 64: 0.85},
    "opt-13b": {8: 9.0, 64: 1.25},
    "opt-30b": {8: 18.0, 64: 4.0},
    "opt-66b": {8: 50.4, 64: 7.5},
}
WITHOUT_LORA = ("opt-6.7b",)


def opt(layers: int, hidden: int, heads: int) -> ModelShape:
    """An OPT model (arXiv 2205.01068) with an MLP of three matrices instead of two."""
    return ModelShape(layers, hidden, round(8 * hidden / 3), heads, heads, hidden // heads, 50272, tied=True)


SHAPES = {
    "opt-6.7b": opt(32, 4096, 32),
    "opt-13b": opt(40, 5120, 40),
    "opt-30b": opt(48, 7168, 56),
    "opt-66b": opt(64, 9216, 72),
}
CRITIC = replace(opt(24, 1024, 16), tied=False, scalar_head=True)


def workload_of(model: str, rows: int) -> Workload:
    """An iteration of so many rows, in one optimizer step."""
    ppo, actor = load_algorithm("ppo"), SHAPES[model]
    models = {"actor": actor, "critic": CRITIC, "reference": actor, "reward": CRITIC}
    workflow = ppo.workflow(ppo.options(epochs=1))
    return recomputing(Workload(workflow, models, rows, 1, rows, rows, 1, TOKENS, TOKENS, 2, max_sequences=rows))


def fastest(model: str, cluster: Cluster, calibration) -> tuple[Forecast, Setup]:
    """One iteration with the largest batch that fits, generated and trained at once."""
    size, lora = cluster.num_devices, model not in WITHOUT_LORA
    rows = MOST_ROWS // size
    while rows:
        found = setups(DEEPSPEED_CHAT, workload_of(model, rows * size), cluster, lora=lora)
        whole = [setup for setup in found if setup.generated == setup.trained == rows]
        if whole:
            seen = [(baseline_forecast(setup, cluster, calibration), setup) for setup in whole]
            return min(seen, key=lambda one: one[0].makespan_s)
        rows //= 2
    raise AssertionError(f"{model} does not fit into {size} devices")


def row_of(model: str, size: int, network: str) -> dict:
    """A row: the forecast hours for both numbers of pairs, and their errors."""
    calibration, cluster = load_calibration(f"{DEVICE}+{network}"), Cluster.parse(f"{size // 8}x8", DEVICE)
    seen, setup = fastest(model, cluster, calibration)
    batch, published = setup.workload.num_sequences, HOURS[model][size]
    row = {
        "bench": "published-hours",
        "model": model,
        "n_gpus": size,
        "network": network if size > 8 else "one node",
        "plan": setup.plan.name,
        "lora": setup.lora,
        "batch": batch,
        "peak_bytes": setup.peak_bytes,
        "iteration_s": seen.makespan_s,
        **{f"{phase}_s": seconds for phase, seconds in phase_s(seen).items()},
        "published_hours": published,
    }
    for name, pairs in PAIRS.items():
        hours = -(-pairs // batch) * seen.makespan_s / 3600
        row[f"hours, {name}"], row[f"error, {name}"] = hours, hours / published - 1
    return row


def main(arguments: list[str]) -> int:
    argparse.ArgumentParser(prog="bench published-hours", description=__doc__.partition("\n")[0]).parse_args(arguments)
    networks = {8: list(NETWORKS)[:1], 64: list(NETWORKS)}
    rows = [row_of(model, size, network) for size in (8, 64) for model in HOURS for network in networks[size]]
    print(text_table("published_hours", rows))
    write("published_hours", rows)
    print(json.dumps({"bench": "published-hours", "cases": len(rows), "ok": True}))
    return 0
