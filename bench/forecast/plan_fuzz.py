"""Random cases of the planner against fixed strategies that are tuned by hand, on layouts that nobody drew.

A case is drawn by its number: a model of 0.5B to 70B, an algorithm, a calibration, one to six nodes of one to eight
devices, lengths, rows and a micro-batch of 1 to 16. Each strategy gets the fastest of a grid of its options that fits
(tuning.py): ZeRO stages, slices, stages, micro-batches that divide the rows of some shard, recomputation, and, for
separation, ranks. `ahead` is how many times as fast as the plan the fastest of them is, less 1; `distance` is how much
longer than the choice of `exact` that of `two_phase` takes, by the model of calls that both share.
"""

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bench.forecast.tuning import best_options
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.errors import UserError
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.seconds import Cost
from rlhf_spmd.plan.proof.check import check
from rlhf_spmd.plan.search.budget import Budget
from rlhf_spmd.plan.search.exact import Best, Space
from rlhf_spmd.plan.search.iteration_model import CallModel
from rlhf_spmd.plan.search.planner import choose, search
from rlhf_spmd.plan.workload import Workload

CASES, QUICK = 60, 3
MOST_AHEAD = 0.01  # of a fixed strategy, before the plan
ALGORITHMS = ("ppo", "grpo", "rloo", "remax", "reinforce_plus_plus", "dpo", "sft")
MODELS = (
    "qwen2.5-0.5b",
    "qwen2.5-1.5b",
    "qwen2.5-7b",
    "qwen2.5-14b",
    "qwen2.5-32b",
    "llama-7b",
    "llama-13b",
    "llama-70b",
)
DEVICES = {name: name.removesuffix("-derived") for name in ("a100-40g-derived", "a100-80g-derived", "a100-80g")}
DEVICES |= {"h100-80g-derived": "h100-80g", "h100-80g": "h100-80g", "cpu-2core": "cpu"}
LARGEST = {"cpu-2core": 2}  # index of the largest model + 1
PER_DEVICE = 10.0e9  # parameters of a model, at most, for a device of a case


def drawn(number: int) -> dict[str, Any]:
    """Returns a case: the values that name it in its row."""
    draw = random.Random(number)
    while True:
        calibration, model = draw.choice(list(DEVICES)), draw.choice(MODELS)
        layout = draw.choice((1, 1, 2, 3, 3, 5, 6)), draw.choice((1, 2, 3, 4, 5, 6, 8, 8))
        size = float(model.partition("-")[2].removesuffix("b"))
        small = calibration not in LARGEST or model in MODELS[: LARGEST[calibration]]
        if small and size * 1e9 <= PER_DEVICE * layout[0] * layout[1]:
            break
    mini_batch = draw.choice((32, 60, 64, 96, 128, 256))
    return {
        "case": number,
        "preset": model,
        "algorithm": ALGORITHMS[number % len(ALGORITHMS)],
        "calibration": calibration,
        "layout": f"{layout[0]}x{layout[1]}",
        "prompt": draw.choice((128, 256, 512)),
        "response": draw.choice((128, 256, 1024)),
        "mini_batch": mini_batch,
        "mini_batches": draw.choice((1, 2, 4)),
        "micro_batch": draw.choice((1, 1, 2, 2, 4, 8, 16)),
    }


def setting(case: Mapping[str, Any]) -> tuple[Workload, Cluster]:
    """Returns the workload and the devices of a case."""
    samples, rows = presets.load(case["preset"], algorithm=case["algorithm"]).samples_per_prompt, case["mini_batch"]
    rows *= case["mini_batches"]
    words = (
        f"rollout_batch={rows // samples if rows % samples == 0 else rows}",
        f"mini_batch={case['mini_batch']}",
        f"micro_batch={case['micro_batch']}",
        f"data.max_prompt={case['prompt']}",
        f"generation.max_new_tokens={case['response']}",
    )
    workload = make_workload(presets.load(case["preset"], words, algorithm=case["algorithm"]))
    return workload, Cluster.parse(case["layout"], DEVICES[case["calibration"]])


def grids(workload: Workload, cluster: Cluster) -> dict[str, dict[str, Sequence[Any]]]:
    """Returns, for each strategy, the options that are tried and their values."""
    size, per_node = cluster.num_devices, cluster.num_devices // len(cluster.nodes)
    rows = workload.mini_batch
    shards = {-(-rows // dp) for dp in range(1, size + 1) if size % dp == 0}
    sizes = sorted({one for some in shards for one in range(1, some + 1) if some % one == 0})
    heads = min(shape.num_kv_heads for shape in workload.models.values() if shape)
    slices = [one for one in range(1, min(per_node, heads) + 1) if per_node % one == 0]
    stages = [one for one in range(1, max(len(cluster.nodes), 4) + 1) if size % one == 0]
    few, either = {"zero": (0, 1, 2, 3), "micro_batch": sizes}, (False, True)
    split = {"zero": (0, 1, 2, 3), "training_tp": slices, "generation_tp": slices}
    found: dict[str, dict[str, Sequence[Any]]] = {
        "flattening": few | {"tp": slices, "recompute": either},
        "interleaving1": dict(few),
        "interleaving2": dict(few),
        "reallocation": split | {"training_pp": stages, "recompute": either, "micro_batch": sizes[::2]},
        "separation": split | {"generation_ranks": _parts(size), "micro_batch": sizes[::3]},
    }
    return found


def _parts(size: int) -> list[int]:
    return sorted({size * eighth // 8 for eighth in (2, 3, 4, 5, 6)} - {0})


def row(case: dict[str, Any]) -> dict[str, Any]:
    """Plans a case and tunes the strategies for it."""
    (workload, cluster), calibration = setting(case), load_calibration(case["calibration"])
    began, found = time.process_time(), case | {"bench": "plan-speed", "what": "fuzz"}
    space = Space.of(CallModel(Cost(calibration, workload, cluster)))
    local, _ = choose(space, "two_phase", Best(1), Budget())
    try:
        result = search(workload, cluster, calibration, keep=10)
    except UserError:
        result = None
    plan_s = time.process_time() - began
    best: tuple[float, str, Mapping[str, Any]] | None = None
    for name, grid in grids(workload, cluster).items():
        tuned = best_options(load_strategy(name), workload, cluster, calibration, grid, most=6)
        if tuned.forecast and (best is None or tuned.forecast.makespan_s < best[0]):
            best = tuned.forecast.makespan_s, name, tuned.options
    found |= {"fixed_s": best and best[0], "strategy": best and best[1], "options": dict(best[2]) if best else {}}
    found |= {"processor_s": plan_s, "bench_s": time.process_time() - began}
    if result is None:
        return found | {"plan_s": None, "gap": None, "distance": None, "ahead": None, "ok": best is None}
    plan = result.plans[0]
    refused = [str(finding) for finding in check(plan.program) if finding.severity == "error"]
    exact_s = min(one.call_level_s for one in result.plans)
    ahead = plan.forecast.makespan_s / best[0] - 1 if best else None
    return found | {
        "plan": plan.name,
        "plan_s": plan.forecast.makespan_s,
        "gap": result.gap,
        "distance": local.seconds / exact_s - 1 if local.found else None,
        "ahead": ahead,
        "refused": refused,
        "ok": not refused and (ahead is None or ahead <= MOST_AHEAD),
    }
