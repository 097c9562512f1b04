"""Forecasts of whole iterations on described machines: strategies side by side over models and layouts.

Each strategy has the best of its options (bench/forecast/tuning.py). --suite asks another question
(bench/forecast/suites.py); --strategy, --preset, --layout and options are for one's own ideas
(bench/forecast/own_ideas.py). With --measure, in an MPI world, the strategies run for real on its devices instead, with
a preset that has weights.

Cost: the whole scan takes ten minutes on one core, --quick one. Command: python -m bench scan [--quick | --suite NAME]
python -m bench scan --algorithm sft|reward_model|dpo
python -m bench scan --strategy mine.py --preset llama-13b --layout 2x8 --csv mine.csv
mpirun -n 4 python -m bench scan --measure --preset tiny
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from bench.baseline_tables import BASELINES
from bench.forecast import stages, suites
from bench.forecast.baselines import fastest_baseline
from bench.forecast.own_ideas import add_arguments, is_own, own_cases, own_grid, workload_words, write_csv
from bench.forecast.suites import SUITES, Case
from bench.forecast.tuning import best_options
from bench.rows import RESULTS, STRATEGIES, read_rows, write
from bench.tables import text_table
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.errors import UserError
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.machines.cluster_calibration import with_reserve
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import DEVICE_BYTES, Cluster, Node
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.cost.forecast import forecast, times_of
from rlhf_spmd.plan.cost.forecast_summary import runs
from rlhf_spmd.plan.cost.memory import num_params, peak_bytes, static_bytes, working_bytes
from rlhf_spmd.plan.cost.simulate import Forecast, simulate
from rlhf_spmd.plan.layout import format_ranks
from rlhf_spmd.plan.program.instructions import Message, Program
from rlhf_spmd.plan.proof.memory_check import memory
from rlhf_spmd.plan.search.planner import BUDGET, search
from rlhf_spmd.plan.workload import Workload

DEVICES_PER_NODE = 8
LONG_BUDGET = 3 * BUDGET  # of the planner's proof; its gap is in the row
SHADOWS, FROZEN = ("actor", "critic"), ("reference", "reward")
# Kind of call -> phase.
PHASES = {"generate": "generation", "infer": "inference", "compute": "inference", "train": "training"}


@dataclass(frozen=True, slots=True)
class Found:
    """What a strategy comes to in one case. program, seen: None where nothing fits, and `why` says what is too much."""

    options: Mapping[str, Any]
    program: Program | None
    seen: Forecast | None
    why: str = ""
    counts: Mapping[str, Any] | None = None


def phase_s(forecast: Forecast) -> dict[str, float]:
    """Seconds during which some rank generates, infers or trains. Phases that overlap sum to more than an iteration."""
    workflow = forecast.program.workload.workflow
    spans: dict[str, list[tuple[float, float]]] = {phase: [] for phase in PHASES.values()}
    for _, step, begin_s, end_s in runs(forecast):
        spans[PHASES[workflow.call(step.call).kind]].append((begin_s, end_s))
    return {phase: _union_s(found) for phase, found in spans.items()}


def _union_s(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that at least one span covers."""
    total_s, until_s = 0.0, float("-inf")
    for begin_s, end_s in sorted(spans):
        total_s += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return total_s


def merged(first: Calibration, second: Calibration) -> Calibration:
    """A cluster with the devices of both and the slower of their links."""
    links = {
        name: min(getattr(first, name), getattr(second, name), key=lambda link: link.bytes_per_s)
        for name in ("inside", "between")
    }
    about = f"{first.name}: {first.provenance} {second.name}: {second.provenance}"
    devices = {**first.devices, **second.devices}
    return replace(first, name=f"{first.name}+{second.name}", devices=devices, provenance=about, **links)


def machine(case: Case) -> tuple[Cluster, Calibration]:
    """The cluster of a case and its constants."""
    if not case.nodes:
        calibration = load_calibration(case.calibration or suites.DEVICE)
        (device,) = calibration.devices
        return Cluster.parse(case.layout, device), calibration
    nodes = tuple(Node(DEVICES_PER_NODE, device, DEVICE_BYTES[device]) for device in case.nodes)
    return Cluster(nodes), merged(*(load_calibration(device) for device in (suites.DEVICE, suites.OTHER_DEVICE)))


def solve(case: Case, workload: Workload, cluster: Cluster, calibration: Calibration) -> Found:
    """The forecast of a case."""
    if case.strategy == "planner":
        return planned(workload, cluster, calibration, **case.options)
    if case.strategy in BASELINES:
        return baseline(case.strategy, workload, cluster, calibration)
    strategy = load_strategy(case.strategy)
    if case.exact:
        program = strategy.compile(workload, cluster, case.options)
        why = "; ".join(finding.message for finding in memory(program))
        return Found(case.options, program, None if why else forecast(program, calibration), why)
    shipped = case.strategy in (*STRATEGIES, "heterogeneous")
    grid = suites.grid_of(case.strategy, cluster.num_devices) if shipped else own_grid(strategy, cluster.num_devices)
    grid |= {name: value if isinstance(value, tuple) else (value,) for name, value in case.options.items()}
    later = suites.later_grid_of(case.strategy, cluster.num_devices)
    best = best_options(strategy, workload, cluster, calibration, grid, later)
    counts = {"num_points": best.num_points, "num_fit": best.num_fit, "num_forecasts": best.num_forecasts}
    return Found(best.options, best.program, best.forecast, best.why, counts)


def baseline(name: str, workload: Workload, cluster: Cluster, calibration: Calibration) -> Found:
    """Another system in its fastest configuration (bench/forecast/baselines.py)."""
    try:
        seen, setup = fastest_baseline(name, workload, cluster, calibration)
    except UserError as error:
        return Found({}, None, None, str(error))
    return Found({"configuration": setup.name}, seen.program, seen, counts={"peak_bytes": setup.peak_bytes})


def planned(workload: Workload, cluster: Cluster, calibration: Calibration, **options: Any) -> Found:
    """The planner's first plan; its options are the layouts of the calls. options: of search()."""
    try:
        found = search(workload, cluster, calibration, **{"budget": LONG_BUDGET} | options)
    except UserError as error:
        return Found({}, None, None, str(error))
    plan = found.plans[0]
    options: dict[str, Any] = {"plan": plan.name, "stream": plan.placement.stream}
    for call, layout in plan.placement.layouts.items():
        micro_batch = "" if layout.micro_batch is None else f" micro_batch {layout.micro_batch}"
        options[call] = f"{layout}{micro_batch} on {format_ranks(layout.ranks)}"
    counts = {"num_scored": found.num_scored, "gap": found.gap}
    return Found(options, plan.program, plan.forecast, counts=counts)


def row_of(case: Case, found: Found, workload: Workload, calibration: Calibration) -> dict:
    """A row: case, seconds and bytes. Sizes are of the fullest device."""
    about = {
        "bench": "scan",
        "algorithm": case.algorithm,
        "preset": case.preset,
        "layout": case.layout,
        "strategy": case.called or case.strategy,
        "nodes": " + ".join(f"{case.nodes.count(device)} {device}" for device in dict.fromkeys(case.nodes)),
        "calibration": calibration.name,
        "options": dict(found.options),
        "why_not": found.why,
        "samples_per_s": None,
        "iteration_s": None,
        **(found.counts or {}),
    }
    if found.program is None:
        return about
    if case.strategy not in BASELINES:
        about |= sizes(found.program)
    if found.seen is None:
        return about
    seconds = found.seen.makespan_s
    about |= {"samples_per_s": workload.num_sequences / seconds, "iteration_s": seconds}
    about |= {f"{phase}_s": value for phase, value in phase_s(found.seen).items()}
    about["device_s"] = device_s(found.seen)
    about |= stages.about(found.seen, calibration) if case.algorithm in stages.STAGES else {}
    return about if case.strategy in BASELINES else about | exposed(found.program, found.seen, calibration)


def sizes(program: Program) -> dict[str, int]:
    """Bytes of the fullest device: its peak, frozen replicas, shadow copies; bytes that an iteration moves."""
    ranks = program.cluster.ranks
    return {
        "peak_bytes": max(peak_bytes(static_bytes(program, rank), working_bytes(program, rank)) for rank in ranks),
        "frozen_bytes": max(copy_bytes(program, rank, FROZEN) for rank in ranks),
        "shadow_bytes": max(copy_bytes(program, rank, SHADOWS) for rank in ranks),
        "data_bytes": sum(transfer.num_bytes for transfer in program.transfers if transfer.model is None),
        "sync_bytes": sum(transfer.num_bytes for transfer in program.transfers if transfer.model is not None),
    }


def copy_bytes(program: Program, rank: int, models: Sequence[str]) -> int:
    """Bytes of the weights of frozen copies on a rank."""
    total, layouts = 0, program.placement.layouts
    for (model, shard), calls in program.copies(rank).items():
        layout, shape = layouts[calls[0]], program.workload.models[model]
        if model in models and shape is not None and not layout.offload:
            params = num_params(shape, shard)
            total += program.workload.param_bytes * (-(-params // layout.dp) if layout.zero == 3 else params)
    return total


def device_s(seen: Forecast) -> dict[str, float]:
    """Seconds of an iteration in each phase, and the rest, in which devices wait: means over devices."""
    workflow, num = seen.program.workload.workflow, seen.program.cluster.num_devices
    found = dict.fromkeys(PHASES.values(), 0.0)
    for _, step, begin_s, end_s in runs(seen):
        found[PHASES[workflow.call(step.call).kind]] += (end_s - begin_s) / num
    return found | {"rest": max(0.0, seen.makespan_s - sum(found.values()))}  # rounding may leave less than nothing


def exposed(program: Program, seen: Forecast, calibration: Calibration) -> dict[str, float]:
    """By how much an iteration is shorter where data keys, or new weights, move in no time."""
    times, found = times_of(program, calibration), {}
    for kind, weights in (("data", False), ("sync", True)):
        moved = {
            message
            for transfer in program.transfers
            if (transfer.model is not None) == weights
            for message in transfer.messages
        }

        def message_s(message: Message, moved=moved) -> float:
            return 0.0 if message in moved else times.message_s(message)

        without_s = simulate(program, replace(times, message_s=message_s)).makespan_s if moved else seen.makespan_s
        found[f"{kind}_exposed_s"] = seen.makespan_s - without_s
    return found


def place_of(row: Mapping) -> tuple:
    """What rows have in common that are compared."""
    return tuple(row.get(key) for key in ("algorithm", "preset", "layout", "nodes", "calibration", "forecast_lengths"))


def with_speed_up(rows: Iterable[dict]) -> list[dict]:
    """The rows with `speed_up`: over flattening in the same place; None where either does not fit."""
    rows = list(rows)
    flat = {place_of(row): row["iteration_s"] for row in rows if row["strategy"] == "flattening"}
    for row in rows:
        base_s = flat.get(place_of(row))
        row["speed_up"] = base_s / row["iteration_s"] if base_s and row["iteration_s"] else None
    return rows


def explained(plan: Mapping, rows: Sequence[Mapping]) -> str:
    """Which plan the planner took, and where it saves what the strategies take, in lines."""
    alike = [row for row in rows if place_of(row) == place_of(plan) and row["iteration_s"]]
    lines = [
        f"{plan['algorithm']}, {plan['preset']} on {plan['layout']}: the planner's plan is {plan['options']['plan']}"
    ]
    for row in sorted(alike, key=lambda row: row["iteration_s"]):
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row["device_s"].items())
        lines.append(f"  {row['strategy']:<14} {row['iteration_s']:6.1f} s: {phases}")
    layouts = (f"  {call}: {layout}" for call, layout in plan["options"].items() if call not in ("plan", "stream"))
    return "\n".join([*lines, *layouts])


def run_suite(cases: Sequence[Case], overrides: Sequence[str] = (), decoded: Sequence[int] = ()) -> list[dict]:
    """The rows of all cases, in order. overrides: options of each; decoded: as in Suite."""
    rows = []
    with tqdm(cases, unit="case", leave=False) as bar:
        for case in bar:
            bar.set_description(f"{case.algorithm} {case.preset} {case.layout} {case.strategy}")
            each = [(f"generation.max_sequences={number}",) for number in decoded] or [()]
            tried = [run_case(case, [*case.overrides, *overrides, *more]) for more in each]
            rows.append(max(tried, key=lambda row: row["samples_per_s"] or 0.0))
    return with_speed_up(rows)


def run_case(case: Case, overrides: Sequence[str]) -> dict:
    """The row of a case with some options."""
    config = load(case.preset, overrides, algorithm=case.algorithm)
    workload, (cluster, calibration) = make_workload(config), machine(case)
    cluster = with_reserve(cluster, config.reserve, calibration)
    row = row_of(case, solve(case, workload, cluster, calibration), workload, calibration)
    lengths = {"forecast_lengths": config.forecast_lengths} if config.forecast_lengths else {}
    return row | lengths | ({"overrides": " ".join(overrides)} if overrides else {})


def others(file: str, rows: Sequence[Mapping]) -> list[dict]:
    """The rows of a file of other algorithms than these rows."""
    path, mine = RESULTS / f"{file}.jsonl", {row["algorithm"] for row in rows}
    return [row for row in read_rows(path) if row["algorithm"] not in mine] if path.exists() else []


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench scan", description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--quick", action="store_true", help="7B on one and two nodes; writes nothing")
    what.add_argument("--suite", choices=[name for name in SUITES if name not in ("all", "quick")])
    what.add_argument("--ahead", action="store_const", const="ahead", dest="suite", help="the suite of that name")
    what.add_argument("--measure", action="store_true", help="run the strategies on the devices of this MPI world")
    add_arguments(parser)
    parsed = parser.parse_args(arguments)
    if parsed.measure:
        from bench.forecast.measure import measure  # imports torch, which forecasts do without

        return measure(parsed.preset or "tiny")
    name = parsed.suite or ("quick" if parsed.quick else "stages" if parsed.algorithm in stages.STAGES else "all")
    suite = SUITES[name]
    own = is_own(suite.cases, parsed)
    try:
        rows = run_suite(
            own_cases(suite.cases, parsed), [*suite.overrides, *workload_words(parsed.overrides)], suite.decoded
        )
        if parsed.csv:
            write_csv(parsed.csv, rows)
    except UserError as error:
        print(f"bench scan: error: {error}", file=sys.stderr)
        return 2
    file = "scan" if name in ("all", "quick") or own and name != "stages" else name.replace("-", "_")
    print(f"{'own rows, which are not kept' if own else suite.title}\n{text_table(file, rows)}")
    for row in rows:
        if row["strategy"] == "planner" and row["samples_per_s"]:
            print(explained(row, rows))
    claims = {} if own else suite.claims(rows)
    for claim, exceptions in claims.items():
        words = (
            "nothing to compare" if exceptions is None else "not for " + "; ".join(exceptions) if exceptions else "yes"
        )
        print(f"{claim}: {words}")
    if not parsed.quick and not own:
        write(file, [*others(file, rows), *rows] if parsed.algorithm else rows)
    ok = all(claims[claim] == [] for claim in suite.promised if not own) and all(
        row["samples_per_s"] or row["why_not"] for row in rows
    )
    holds = {claim: None if cases is None else not cases for claim, cases in claims.items()}
    print(json.dumps({"bench": "scan", "suite": name, "cases": len(rows), **holds, "ok": ok}))
    return 0 if ok else 1
