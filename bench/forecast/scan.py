"""Forecasts of whole iterations on described machines: strategies side by side over models and layouts.

Each strategy has the best of its options (bench/forecast/tuning.py). --suite asks another question
(bench/forecast/suites.toml); --strategy, --preset, --layout, --calibration and options are for one's own ideas
(bench/forecast/own_ideas.py).

Cost: ten minutes of a core, --quick one. Commands:
python -m bench scan [--quick | --suite NAME]
python -m bench scan --algorithm sft|reward_model|dpo
python -m bench scan --strategy mine.py --preset llama-13b --layout 2x8 --csv mine.csv
python -m bench scan --device-type h100-80g --preset llama-7b
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from tqdm import tqdm

from bench.forecast.baselines import fastest_baseline
from bench.forecast.claims import place_of
from bench.forecast.own_ideas import add_arguments, is_own, own_cases, own_grid, workload_words, write_csv
from bench.forecast.spaces import SPACES, within
from bench.forecast.suites import GRIDS, STAGES, SUITES, Case, grid_of, later_grid_of
from bench.forecast.tuning import Found, best_options
from bench.forecast.validate_systems import fastest
from bench.rows import BASELINES, Arguments, write
from bench.tables import finished, text_table
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.errors import UserError
from rlhf_spmd.machines.calibration_file import load_calibration, with_reserve
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.bottleneck import limits
from rlhf_spmd.plan.cost.calibration import Calibration, Link
from rlhf_spmd.plan.cost.forecast import forecast, times_of
from rlhf_spmd.plan.cost.forecast_summary import runs
from rlhf_spmd.plan.cost.memory import num_params, peak_bytes, static_bytes, working_bytes
from rlhf_spmd.plan.cost.simulate import Forecast, simulate
from rlhf_spmd.plan.layout import format_ranks
from rlhf_spmd.plan.program.instructions import Message, Program
from rlhf_spmd.plan.proof.memory_check import memory
from rlhf_spmd.plan.search.planner import BUDGET, search
from rlhf_spmd.plan.workload import Workload

HEURISTIC = "real-heuristic"  # as a strategy of cases
LONG_BUDGET = 3 * BUDGET  # of the planner's proof; its gap is in the row
SHADOWS, FROZEN = ("actor", "critic"), ("reference", "reward")
# Kind of call -> phase.
PHASES = {"generate": "generation", "infer": "inference", "compute": "inference", "train": "training"}
LIMITS = {"products": "compute", "messages": "network"}  # of limits(), as rows call them


# ---- forecasts ------------------------------------------------------------------------------------------------------


def machine(case: Case) -> tuple[Cluster, Calibration]:
    """Returns the cluster of a case and its constants. Raises UserError if its layout and its constants name different
    numbers of types of device."""
    calibration, layouts = load_calibration(case.calibration), case.layout.split("+")
    if len(layouts) != len(calibration.devices):
        types = ", ".join(calibration.devices)
        raise UserError(f"layout {case.layout} wants nodes of {len(layouts)} types, and the calibration has {types}")
    parts = [Cluster.parse(*pair) for pair in zip(layouts, calibration.devices, strict=True)]
    return Cluster(tuple(node for part in parts for node in part.nodes)), calibration


def solve(case: Case, workload: Workload, cluster: Cluster, calibration: Calibration) -> Found:
    """Forecasts a case."""
    try:
        if case.strategy == "planner":
            return planned(workload, cluster, calibration, **case.options)
        if case.strategy in BASELINES:
            seen, setup = fastest_baseline(case.strategy, workload, cluster, calibration)
            return Found({"configuration": setup.name}, seen.program, seen, counts={"peak_bytes": setup.peak_bytes})
        if case.strategy == HEURISTIC:
            seen, configuration = fastest("ReaL-Heuristic", workload, cluster, calibration)
            return Found({"configuration": configuration}, seen.program, seen)
    except UserError as error:
        return Found({}, None, None, str(error))
    strategy, size = load_strategy(case.strategy), cluster.num_devices
    if case.exact:
        program = strategy.compile(workload, cluster, case.options)
        why = "; ".join(finding.message for finding in memory(program))
        return Found(case.options, program, None if why else forecast(program, calibration), why)
    grid = grid_of(case.strategy, size) if case.strategy in GRIDS else own_grid(strategy)
    grid |= {name: value if isinstance(value, tuple) else (value,) for name, value in case.options.items()}
    return best_options(strategy, workload, cluster, calibration, grid, later_grid_of(case.strategy, size))


def planned(
    workload: Workload,
    cluster: Cluster,
    calibration: Calibration,
    *,
    space: Sequence[str] = (),
    graphs: bool = False,
    **how: Any,
) -> Found:
    """Finds the planner's first plan with these arguments of search(); its options are the layouts of the calls.

    space: names of SPACES, of which it keeps to each.
    graphs: decode steps start in no time.
    """
    if graphs:
        devices = {name: replace(device, graph_layer_s=0.0) for name, device in calibration.devices.items()}
        calibration = replace(calibration, devices=devices)
    how |= {"allowed": within([SPACES[name](workload) for name in space])} if space else {}
    found = search(workload, cluster, calibration, **{"budget": LONG_BUDGET} | how)
    plan = found.plans[0]
    options: dict[str, Any] = {"plan": plan.name, "stream": plan.placement.stream}
    for call, layout in plan.placement.layouts.items():
        micro_batch = "" if layout.micro_batch is None else f" micro_batch {layout.micro_batch}"
        options[call] = f"{layout}{micro_batch} on {format_ranks(layout.ranks)}"
    return Found(options, plan.program, plan.forecast, counts={"num_scored": found.num_scored, "gap": found.gap})


# ---- rows -----------------------------------------------------------------------------------------------------------


def row_of(case: Case, found: Found, workload: Workload, calibration: Calibration) -> dict:
    """Makes a row: case, seconds and bytes. Sizes are of the fullest device."""
    row = {
        "bench": "scan",
        "algorithm": case.algorithm,
        "preset": case.preset,
        "layout": case.layout,
        "strategy": case.called or case.strategy,
        "calibration": calibration.name,
        "options": dict(found.options),
        "why_not": found.why,
        "samples_per_s": None,
        "iteration_s": None,
        **found.counts,
    }
    is_ours = case.strategy not in BASELINES
    if found.program is not None and is_ours:
        row |= sizes(found.program)
    if found.program is None or found.forecast is None:
        return row
    seconds = found.forecast.makespan_s
    row |= {"samples_per_s": workload.num_sequences / seconds, "iteration_s": seconds}
    row |= {f"{phase}_s": value for phase, value in phase_s(found.forecast).items()}
    row["device_s"] = device_s(found.forecast)
    row |= of_step(found.forecast, calibration) if case.algorithm in STAGES else {}
    return row | (exposed(found.program, found.forecast, calibration) if is_ours else {})


def phase_s(forecast: Forecast) -> dict[str, float]:
    """Returns the seconds in which some rank generates, infers or trains; these phases may overlap."""
    workflow = forecast.program.workload.workflow
    spans: dict[str, list[tuple[float, float]]] = {phase: [] for phase in PHASES.values()}
    for _, step, begin_s, end_s in runs(forecast):
        spans[PHASES[workflow.call(step.call).kind]].append((begin_s, end_s))
    return {phase: _union_s(found) for phase, found in spans.items()}


def _union_s(spans: Iterable[tuple[float, float]]) -> float:
    """Sums the seconds that at least one span covers."""
    total_s, until_s = 0.0, -inf
    for begin_s, end_s in sorted(spans):
        total_s += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return total_s


def sizes(program: Program) -> dict[str, int]:
    """Counts the bytes of the fullest device (peak, frozen replicas, shadows), and those that an iteration moves."""
    ranks = program.cluster.ranks
    return {
        "peak_bytes": max(peak_bytes(static_bytes(program, rank), working_bytes(program, rank)) for rank in ranks),
        "frozen_bytes": max(copy_bytes(program, rank, FROZEN) for rank in ranks),
        "shadow_bytes": max(copy_bytes(program, rank, SHADOWS) for rank in ranks),
        "data_bytes": sum(transfer.num_bytes for transfer in program.transfers if transfer.model is None),
        "sync_bytes": sum(transfer.num_bytes for transfer in program.transfers if transfer.model is not None),
    }


def copy_bytes(program: Program, rank: int, models: Sequence[str]) -> int:
    """Counts the bytes of the weights of frozen copies on a rank."""
    total, layouts = 0, program.placement.layouts
    for (model, shard), calls in program.copies(rank).items():
        layout, shape = layouts[calls[0]], program.workload.models[model]
        if model in models and shape is not None and not layout.offload:
            params = num_params(shape, shard)
            total += program.workload.param_bytes * (-(-params // layout.dp) if layout.zero == 3 else params)
    return total


def device_s(seen: Forecast) -> dict[str, float]:
    """Averages the seconds of an iteration over devices, by phase; the rest is the time in which devices wait."""
    workflow, num = seen.program.workload.workflow, seen.program.cluster.num_devices
    found = dict.fromkeys(PHASES.values(), 0.0)
    for _, step, begin_s, end_s in runs(seen):
        found[PHASES[workflow.call(step.call).kind]] += (end_s - begin_s) / num
    return found | {"rest": max(0.0, seen.makespan_s - sum(found.values()))}  # rounding may leave less than nothing


def of_step(seen: Forecast, calibration: Calibration) -> dict[str, Any]:
    """Describes a stage that generates nothing: seconds of a step, tokens per second of a device, what limits each
    call, and seconds of an iteration in which messages take no time."""
    workload, program = seen.program.workload, seen.program
    sequences = workload.num_sequences * max(call.num_sequences for call in workload.workflow.placed_calls)
    tokens = sequences * (workload.max_prompt + workload.max_response)
    free = replace(calibration, inside=Link(inf, 0.0), between=Link(inf, 0.0))
    return {
        "step_s": seen.makespan_s / workload.num_mini_batches,
        "tokens_per_s_device": tokens / seen.makespan_s / program.cluster.num_devices,
        "limits": {call: LIMITS.get(what, what) for call, what in limits(program, calibration).items()},
        "without_messages_s": forecast(program, free).makespan_s,
    }


def exposed(program: Program, seen: Forecast, calibration: Calibration) -> dict[str, float]:
    """Measures by how much an iteration is shorter where data keys, or new weights, move in no time."""
    times, found = times_of(program, calibration), {}
    for kind, weights in (("data", False), ("sync", True)):
        of_kind = (transfer for transfer in program.transfers if (transfer.model is not None) == weights)
        moved = {message for transfer in of_kind for message in transfer.messages}

        def message_s(message: Message, moved=moved) -> float:
            return 0.0 if message in moved else times.message_s(message)

        without_s = simulate(program, replace(times, message_s=message_s)).makespan_s if moved else seen.makespan_s
        found[f"{kind}_exposed_s"] = seen.makespan_s - without_s
    return found


def with_speed_up(rows: Iterable[dict]) -> list[dict]:
    """Adds `speed_up` over flattening in the same place to the rows; None where either does not fit."""
    rows = list(rows)
    flat = {place_of(row): row["iteration_s"] for row in rows if row["strategy"] == "flattening"}
    for row in rows:
        base_s = flat.get(place_of(row))
        row["speed_up"] = base_s / row["iteration_s"] if base_s and row["iteration_s"] else None
    return rows


# ---- suites ---------------------------------------------------------------------------------------------------------


def run_suite(cases: Sequence[Case], overrides: Sequence[str] = (), decoded: Sequence[int] = ()) -> list[dict]:
    """Returns the rows of all cases, in order. overrides: options of each; decoded: as in Suite."""
    rows = []
    with tqdm(cases, unit="case", leave=False) as bar:
        for case in bar:
            bar.set_description(f"{case.algorithm} {case.preset} {case.layout} {case.strategy}")
            each = [(f"generation.max_sequences={number}",) for number in decoded] or [()]
            tried = [run_case(case, [*case.overrides, *overrides, *more]) for more in each]
            rows.append(max(tried, key=lambda row: row["samples_per_s"] or 0.0))
    return with_speed_up(rows)


def run_case(case: Case, overrides: Sequence[str]) -> dict:
    """Returns the row of a case with some options."""
    config = load(case.preset, overrides, algorithm=case.algorithm)
    workload, (cluster, calibration) = make_workload(config), machine(case)
    cluster = with_reserve(cluster, config.reserve, calibration)
    row = row_of(case, solve(case, workload, cluster, calibration), workload, calibration)
    lengths = {"forecast_lengths": config.forecast_lengths} if config.forecast_lengths else {}
    return row | lengths | ({"overrides": " ".join(overrides)} if overrides else {})


def main(arguments: list[str]) -> int:
    parser = Arguments("scan", __doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--quick", action="store_true", help="7B on one and two nodes; writes nothing")
    what.add_argument("--suite", choices=[name for name in SUITES if name not in ("all", "quick")])
    add_arguments(parser)
    parsed = parser.parse_args(arguments)
    name = parsed.suite or ("quick" if parsed.quick else "stages" if parsed.algorithm in STAGES else "all")
    suite, own = SUITES[name], is_own(parsed)
    words = [*suite.overrides, *workload_words(parsed.overrides)]
    rows = run_suite(own_cases(suite.cases, parsed), words, suite.decoded)
    if parsed.csv:
        write_csv(parsed.csv, rows)
    file = "scan" if name in ("all", "quick") or (own and name != "stages") else name.replace("-", "_")
    print(f"{'own rows, which are not kept' if own else suite.title}\n{text_table(file, rows)}")
    claims = {} if own else suite.claims(rows)
    for claim, cases in claims.items():
        words = "nothing to compare" if cases is None else "not for " + "; ".join(cases) if cases else "yes"
        print(f"{claim}: {words}")
    if name != "quick" and not own:
        write(file, rows)
    ok = all(claims[claim] == [] for claim in suite.promised if not own) and all(
        row["samples_per_s"] or row["why_not"] for row in rows
    )
    holds = {claim: None if cases is None else not cases for claim, cases in claims.items()}
    return finished("scan", suite=name, cases=len(rows), **holds, ok=ok)
