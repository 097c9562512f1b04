"""How long planning takes on one core: programs of 1,024 ranks from layouts to forecast, searches for 8x8 and 128x8;
then the planner's methods side by side, from 8 to 1,024 devices, and how far they end from the optimum.

Calibration a100-80g, processor seconds, so that other work on the machine does not count. What is promised is of
LLaMA-2 70B models: the search is exact in the call-level model, with a proof; compiling and simulating the best plans
is shown apart.

For the methods, models grow with the devices as in ReaL's experiments (arXiv 2406.14088): 7B on 8, 13B on 16, 33B on
32, 70B from 64 on. An iteration has 512 responses, as theirs has with the shortest ones, and from 128 devices on four
for each. The distance is that of the best choice, in the call-level model that all methods share, from the exact
optimum; where `exact` has spent LONG_BUDGET, from the best choice of all methods. APP's space (spaces.py) is searched
exactly, part by part, so what it lacks is due to the space.

The fuzz draws a case by its number: a model of 0.5B to 70B, an algorithm, a calibration, one to six nodes of one to
eight devices, lengths, rows and a micro-batch of 1 to 16. Each strategy gets the fastest of a grid of its options that
fits (tuning.py): ZeRO stages, slices, stages, micro-batches that divide the rows of some shard, recomputation, and, for
separation, ranks. None of them may be more than 1% faster than the plan, and `check` may refuse no plan. `ahead` is how
many times as fast as the plan the fastest of them is, less 1; `distance` is how much longer than the choice of `exact`
that of `two_phase` takes, by the model of calls that both share.

Cost: two minutes, eight for the methods and an hour for the fuzz, which only runs if it is named.
Command: python -m bench plan-speed [--part promised | methods | fuzz] [--layout NxG] [--quick] [--cases N]
[--device-type h100-80g]
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bench.forecast.own_ideas import add_machine, calibration_of
from bench.forecast.spaces import apps_parts
from bench.forecast.tuning import best_options
from bench.rows import Arguments, rows_so_far, write
from bench.tables import finished, text_table
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.errors import UserError
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.cost.seconds import Cost
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.proof.check import check
from rlhf_spmd.plan.search.budget import Budget
from rlhf_spmd.plan.search.exact import Best, Space
from rlhf_spmd.plan.search.iteration_model import CallModel
from rlhf_spmd.plan.search.planner import BUDGET, choose, search, simulated
from rlhf_spmd.plan.workload import Workload

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
KEPT = {"8x8": 20, RANKS: 2}  # plans that are simulated, which is shown apart; of 1,024 ranks each takes ten seconds

FAMILY = {"1x8": "llama-7b", "2x8": "llama-13b", "4x8": "llama-33b"}  # of the methods: layout -> preset
FAMILY |= {f"{nodes}x8": PRESET for nodes in (8, 16, 32, 64, 128)}
ROWS, ROWS_OF_DEVICE, MINI_BATCHES = 512, 4, 4  # at least, for each device, and parts of an iteration
EXACT, TWO_PHASE, MCMC, APP = METHODS = ("exact", "two_phase", "mcmc", "APP's space")
LONG_BUDGET = 6 * BUDGET  # of the exact search; APP's parts share it
KEEP = 2  # choices that are simulated
MOST_SIMULATED = 256  # devices: of 1,024 each program takes ten seconds, and those that stream are tried in ten ways

# of the fuzz
CASES, QUICK = 60, 3
MOST_AHEAD = 0.01  # of a fixed strategy, before the plan
DRAWN_ALGORITHMS = ("ppo", "grpo", "rloo", "remax", "reinforce_plus_plus", "dpo", "sft")
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
TYPES = {name: name.removesuffix("-derived") for name in ("a100-40g-derived", "a100-80g-derived", "a100-80g")}
TYPES |= {"h100-80g-derived": "h100-80g", "h100-80g": "h100-80g", "cpu-2core": "cpu"}
LARGEST = {"cpu-2core": 2}  # index of the largest model + 1
MOST_PARAMS = 10.0e9  # parameters of a model, at most, for a device of a case


def cluster_of(layout: str, calibration: Calibration) -> Cluster:
    """Returns devices of the one type of a calibration."""
    (device,) = calibration.devices
    return Cluster.parse(layout, device)


def timed(work: Callable) -> tuple[float, object]:
    """Calls `work` -> processor seconds, and the result."""
    began = time.process_time()
    found = work()
    return time.process_time() - began, found


# ---- what is promised -----------------------------------------------------------------------------------------------


def program_row(strategy: str, calibration: Calibration) -> dict:
    """Measures the seconds of a program from its layouts to its forecast."""
    workload = make_workload(presets.load(PRESET, WORDS))
    cluster = cluster_of(RANKS, calibration)
    placement = load_strategy(strategy).place(workload, cluster, **STRATEGIES[strategy])
    compile_s, program = timed(lambda: compile_program(workload, placement, cluster))
    check_s, _ = timed(lambda: check(program))
    simulate_s, found = timed(lambda: forecast(program, calibration))
    whole_s = compile_s + check_s + simulate_s
    row = {"what": f"program, {strategy}", "layout": RANKS, "compile_s": compile_s, "check_s": check_s}
    row |= {"simulate_s": simulate_s, "seconds": whole_s, "promised_s": PROGRAM_S, "ok": whole_s <= PROGRAM_S}
    return row | {"forecast_s": found.makespan_s}


def search_row(layout: str, calibration: Calibration) -> dict:
    """Measures the processor seconds of a search, and of simulating what it found."""
    words = WORDS if layout == RANKS else ()
    workload = make_workload(presets.load(PRESET, words))
    cluster = cluster_of(layout, calibration)
    found = search(workload, cluster, calibration, keep=KEPT[layout])
    row = {"what": "search, exact", "layout": layout, "seconds": found.processor_s, "simulate_s": found.simulate_s}
    row |= {"gap": found.gap, "num_plans": len(found.plans), "forecast_s": found.plans[0].forecast.makespan_s}
    return row | {"promised_s": SEARCH_S[layout], "ok": found.processor_s <= SEARCH_S[layout]}


def promised(calibration: Calibration) -> bool:
    """Checks that the programs and searches of which a time is promised are within it."""
    rows = [program_row(name, calibration) for name in STRATEGIES]
    rows += [search_row(layout, calibration) for layout in SEARCH_S]
    rows = [{"bench": "plan-speed", "calibration": calibration.name} | row for row in rows]
    print(text_table("plan_speed", rows), flush=True)
    write("plan_speed", rows)
    return all(row["ok"] for row in rows)


# ---- the methods ----------------------------------------------------------------------------------------------------


def setting(layout: str, calibration: Calibration) -> tuple[Workload, Cluster]:
    """Returns the workload and the devices of a row."""
    cluster = cluster_of(layout, calibration)
    rows = max(ROWS, ROWS_OF_DEVICE * cluster.num_devices)
    words = (f"rollout_batch={rows}", f"mini_batch={rows // MINI_BATCHES}")
    return make_workload(presets.load(FAMILY[layout], words)), cluster


def searched(
    method: str, workload: Workload, cluster: Cluster, calibration: Calibration
) -> tuple[Space, Best, float | None]:
    """Returns a space, the best choices of a method, and the gap; None if the method proves nothing."""
    best = Best(KEEP)
    if method != APP:
        space = Space.of(CallModel(Cost(calibration, workload, cluster)))
        _, gap = choose(space, method, best, Budget(BUDGET if method == MCMC else LONG_BUDGET))
        return space, best, gap
    spaces = [part.space(workload, cluster, calibration) for part in apps_parts(cluster)]
    spaces = [space for space in spaces if space is not None]
    gaps = [choose(space, EXACT, best, Budget(LONG_BUDGET // len(spaces)))[1] for space in spaces]
    return spaces[0], best, max(gaps)


def method_row(method: str, layout: str, calibration: Calibration) -> dict:
    """Measures one method on one layout."""
    workload, cluster = setting(layout, calibration)
    clock_s = time.perf_counter()
    processor_s, (space, best, gap) = timed(lambda: searched(method, workload, cluster, calibration))
    row = {"bench": "plan-speed", "what": "method", "method": method, "preset": FAMILY[layout], "layout": layout}
    row["calibration"] = calibration.name
    row |= {"devices": cluster.num_devices, "rows": workload.num_sequences, "seconds": time.perf_counter() - clock_s}
    row |= {"processor_s": processor_s, "num_scored": best.num_scored, "gap": gap}
    row["call_level_s"] = best.seconds if best.found else None
    if best.found and cluster.num_devices <= MOST_SIMULATED:
        plans = simulated(space, best, TWO_PHASE if method == APP else method, calibration)  # with exchanges of pairs
        row |= {"plan": plans[0].name, "forecast_s": plans[0].forecast.makespan_s}
    return row


def with_distances(rows: Sequence[dict]) -> Iterator[dict]:
    """Adds to the rows of one layout `proved`, whether the optimum is known, and `distance`: from the optimum or,
    without a proof, from the best choice of all methods; None where a method found nothing."""
    proved = next(row["gap"] for row in rows if row["method"] == EXACT) == 0.0
    least_s = min(row["call_level_s"] for row in rows if row["call_level_s"])
    for row in rows:
        yield row | {"proved": proved, "distance": row["call_level_s"] / least_s - 1 if row["call_level_s"] else None}


def methods(layouts: Sequence[str], calibration: Calibration) -> bool:
    """Checks that each method finds a placement wherever another one does; keeps the rows of other layouts."""
    rows = [row for row in rows_so_far("plan_methods") if row["layout"] not in layouts]
    for layout in layouts:
        found = list(with_distances([method_row(method, layout, calibration) for method in METHODS]))
        print(text_table("plan_methods", found), flush=True)
        rows += found
    write("plan_methods", sorted(rows, key=lambda row: row["devices"]))
    return all(row["distance"] is not None for row in rows if row["method"] != APP)


# ---- the fuzz -------------------------------------------------------------------------------------------------------


def drawn(number: int) -> dict[str, Any]:
    """Returns a case: the values that name it in its row."""
    draw = random.Random(number)
    while True:
        calibration, model = draw.choice(list(TYPES)), draw.choice(MODELS)
        layout = draw.choice((1, 1, 2, 3, 3, 5, 6)), draw.choice((1, 2, 3, 4, 5, 6, 8, 8))
        size = float(model.partition("-")[2].removesuffix("b"))
        small = calibration not in LARGEST or model in MODELS[: LARGEST[calibration]]
        if small and size * 1e9 <= MOST_PARAMS * layout[0] * layout[1]:
            break
    mini_batch = draw.choice((32, 60, 64, 96, 128, 256))
    return {
        "case": number,
        "preset": model,
        "algorithm": DRAWN_ALGORITHMS[number % len(DRAWN_ALGORITHMS)],
        "calibration": calibration,
        "layout": f"{layout[0]}x{layout[1]}",
        "prompt": draw.choice((128, 256, 512)),
        "response": draw.choice((128, 256, 1024)),
        "mini_batch": mini_batch,
        "mini_batches": draw.choice((1, 2, 4)),
        "micro_batch": draw.choice((1, 1, 2, 2, 4, 8, 16)),
    }


def setting_of(case: Mapping[str, Any]) -> tuple[Workload, Cluster]:
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
    return workload, Cluster.parse(case["layout"], TYPES[case["calibration"]])


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


def fuzz_row(case: dict[str, Any]) -> dict[str, Any]:
    """Plans a case and tunes the strategies for it."""
    (workload, cluster), calibration = setting_of(case), load_calibration(case["calibration"])
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


def fuzz(numbers: Sequence[int], *, quick: bool) -> bool:
    """Checks drawn cases. Writes the rows, unless it is quick."""
    rows = []
    for number in numbers:
        rows.append(fuzz_row(drawn(number)))
        print(text_table("plan_fuzz", rows[-1:]), flush=True)
        if not quick:
            write("plan_fuzz", rows)
    return all(row["ok"] for row in rows)


def main(arguments: list[str]) -> int:
    parser = Arguments("plan-speed", __doc__)
    parser.add_argument("--part", choices=("promised", "methods", "fuzz"), help="without it, the first two")
    parser.add_argument("--layout", choices=FAMILY, help="the methods on this one only; the rows of others are kept")
    parser.add_argument("--cases", type=int, default=CASES, help="of the fuzz (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="of the fuzz, a few cases; writes nothing")
    add_machine(parser)
    parsed = parser.parse_args(arguments)
    calibration, found = load_calibration(calibration_of(parsed, DEVICE)), {}
    if parsed.part == "fuzz":
        found["fuzz"] = fuzz(range(QUICK if parsed.quick else parsed.cases), quick=parsed.quick)
    if parsed.part in (None, "promised"):
        found["promised"] = promised(calibration)
    if parsed.part in (None, "methods"):
        found["methods"] = methods([parsed.layout] if parsed.layout else list(FAMILY), calibration)
    return finished("plan-speed", **found, ok=all(found.values()))
