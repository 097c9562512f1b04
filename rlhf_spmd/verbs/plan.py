"""The plan verb: searches placements, shows the best beside the shipped strategies, and writes the winner as a module.

Needs neither torch nor MPI. `train --strategy auto` plans by the same functions.
"""

import argparse
import json
import shlex
import time
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from textwrap import wrap
from types import ModuleType
from typing import Any

from rlhf_spmd import presets
from rlhf_spmd.calibration_file import SHIPPED, load_calibration
from rlhf_spmd.cluster_file import read_cluster
from rlhf_spmd.config import Config, make_workload
from rlhf_spmd.errors import UserError
from rlhf_spmd.fitting import COMPARED, missing_bytes, options_of
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.bottleneck import limits
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.cost.memory_timeline import most_bytes
from rlhf_spmd.plan.cost.simulate import Forecast
from rlhf_spmd.plan.cost.summary import bubble, call_s, runs
from rlhf_spmd.plan.layout import format_ranks
from rlhf_spmd.plan.program.instructions import Agree, Load, Program, Run, Wait, communicators
from rlhf_spmd.plan.proof.check import check
from rlhf_spmd.plan.proof.memory_check import memory
from rlhf_spmd.plan.search.planner import SearchResult, search
from rlhf_spmd.plan.text.listing import format_bytes, table
from rlhf_spmd.plan.text.strategy_module import MAX_LINE, strategy_source
from rlhf_spmd.plan.workload import Workload
from rlhf_spmd.strategy import Strategy, load_strategy

CPU_CALIBRATION = "cpu-2core"  # of ranks without a device of their own
TIGHT = "keys and values do not all fit: will be slower"  # the warning of fit.memory in a few words
KEEP = 20  # plans that are simulated
MOST_LANES = 8  # of a timeline; of more ranks, those that do the same share a lane


@dataclass(frozen=True, slots=True)
class Alternative:
    """A row of the table: a plan or a shipped strategy with its forecast, or why there is none."""

    name: str
    program: Program | None
    forecast: Forecast | None
    note: str = ""  # options that were chosen, or why there is no forecast
    missing_bytes: int = 0  # of a device, where it does not fit


def run(parsed: argparse.Namespace) -> int:
    """The verb. Returns the exit status: 0, because whatever goes wrong is a UserError."""
    config, workload, cluster, calibration = read(parsed)
    out = _files(parsed, config, cluster)
    began = time.perf_counter()
    rows, found = rows_of(parsed, workload, cluster, calibration)
    winner = fastest(rows, cluster)
    plan_s = found.search_s
    simulate_s = time.perf_counter() - began - plan_s  # of the best plans, and of the strategies with their options
    where = f"{config.preset} on {cluster} ({', '.join(cluster.device_types)})"
    took = f"{found.num_scored:,} plans scored in {plan_s:.1f} s, programs simulated in {simulate_s:.1f} s"
    print(f"{where}, seconds by calibration {calibration.name}: {took}")
    print(show(rows, calibration))
    _write(out, module_source(winner, config, calibration, parsed.overrides))
    print(f"\nThe fastest, {winner.name}, is written to {out}; try it:")
    print(f"  python -m rlhf_spmd {shlex.join(['check', str(out), *_where(parsed, cluster), *parsed.overrides])}")
    if parsed.timeline:
        draw(winner, parsed.timeline, title=f"Forecast of {winner.name}: {where}")
    seconds = {row.name: row.forecast.makespan_s if row.forecast else None for row in rows}
    result = {"name": winner.name, "out": str(out), "forecast_s": winner.forecast.makespan_s, "plan_s": plan_s}
    result |= {"simulate_s": simulate_s, "gap": found.gap, "num_scored": found.num_scored, "plans": seconds, "ok": True}
    print(json.dumps(result))
    return 0


def rows_of(
    parsed: argparse.Namespace, workload: Workload, cluster: Cluster, calibration: Calibration
) -> tuple[list[Alternative], SearchResult]:
    """The best plans, then the shipped strategies; and how the search went."""
    shipped = [beside(name, workload, cluster, calibration) for name in COMPARED]
    keep = max(parsed.top, KEEP)
    found = searched(shipped, workload, cluster, calibration, method=parsed.method, seed=parsed.seed, keep=keep)
    return numbered(found)[: parsed.top] + shipped, found


def numbered(found: SearchResult) -> list[Alternative]:
    """The plans of a search as rows whose names differ."""
    plans = enumerate(found.plans, start=1)
    return [Alternative(f"plan {number} ({plan.name})", plan.program, plan.forecast) for number, plan in plans]


def _files(parsed: argparse.Namespace, config: Config, cluster: Cluster) -> Path:
    """Where the winner is written. Raises UserError if that, or the picture, would replace a file untold."""
    out = Path(parsed.out or f"runs/plan-{config.preset}-{cluster}.py")
    for path in (out, *([Path(parsed.timeline)] if parsed.timeline else [])):
        if path.exists() and not parsed.overwrite:
            raise UserError(f"{path} exists already; pass --overwrite, or name another file (--out, --timeline)")
    return out


def read(parsed: argparse.Namespace, layout: str = "1x4") -> tuple[Config, Workload, Cluster, Calibration]:
    """What to plan for; layout: if none is named. Raises UserError for anything that does not exist or does not fit
    together."""
    config, cluster, calibration = read_place(parsed, layout)
    refuse_options(config)
    return config, make_workload(config), cluster, need_calibration(calibration, cluster)


def read_place(parsed: argparse.Namespace, layout: str = "1x4") -> tuple[Config, Cluster, Calibration | None]:
    """Which models on which devices, and the calibration of these, if there is one. Raises UserError as read() does."""
    named = load_calibration(parsed.calibration) if parsed.calibration else None
    config = presets.load(parsed.preset, parsed.overrides, parsed.model, algorithm=parsed.algorithm)
    if parsed.cluster and (parsed.layout or parsed.device_type):
        raise UserError("--cluster says how many devices of which type there are; drop --layout and --device-type")
    if parsed.cluster:
        cluster = read_cluster(parsed.cluster)
    else:
        only = next(iter(named.devices)) if named and len(named.devices) == 1 else config.device_type
        cluster = Cluster.parse(parsed.layout or layout, parsed.device_type or only)
    if set(cluster.device_types) != {"cpu"}:
        config = presets.load(parsed.preset, parsed.overrides, parsed.model, algorithm=parsed.algorithm, on_gpu=True)
    return config, cluster, calibration_for(parsed.calibration, cluster)


def need_calibration(found: Calibration | None, cluster: Cluster) -> Calibration:
    """Raises UserError if there is none."""
    if found is None:
        raise UserError(f"no calibration of {', '.join(cluster.device_types)} is shipped; give --calibration FILE.json")
    return found


def refuse_options(config: Config) -> None:
    """Raises UserError if there are options for a strategy that is still to be found."""
    if config.strategy:
        first = next(iter(config.strategy))
        raise UserError(f"strategy.{first} is an option of a strategy, but the planner chooses every layout; drop it")


def calibration_for(name: str | None, cluster: Cluster) -> Calibration | None:
    """The calibration of that name, else the shipped one of the cluster's devices; None if there is none, or if they
    are of several types. Raises UserError if it does not know a type of device."""
    if name is None:
        first, *more = cluster.device_types
        name = CPU_CALIBRATION if first == "cpu" else first
        if more or not (SHIPPED / f"{name}.json").is_file():
            return None
    found = load_calibration(name)
    for device in cluster.device_types:
        found.require(device)
    return found


# ---- what is compared ------------------------------------------------------------------------------------------------


def beside(name: str, workload: Workload, cluster: Cluster, calibration: Calibration) -> Alternative:
    """A shipped strategy with the first of a few options with which it fits; else why it does not."""
    strategy, refused, short = load_strategy(name), "", {}
    for options in options_of(name, workload, cluster):
        words = " ".join(f"{option}={value}" for option, value in options.items())
        try:
            program = strategy.compile(workload, cluster, options)
        except UserError as error:
            refused = refused or str(error).removeprefix(f"strategy {name}: ")
            continue
        if not any(finding.severity == "error" for finding in memory(program)):
            return Alternative(name, program, forecast(program, calibration), words)
        short[words] = missing_bytes(program)
    if not short:
        return Alternative(name, None, None, refused)
    words = min(short, key=short.__getitem__)
    with_options = f" with {words}" if words else ""
    note = f"does not fit: a device lacks {format_bytes(short[words])}{with_options}"
    return Alternative(name, None, None, note, short[words])


def searched(shipped: list[Alternative], workload: Workload, cluster: Cluster, calibration: Calibration, **options):
    """What search() finds with these options. Where nothing fits, the error says what the shipped strategies lack."""
    try:
        return search(workload, cluster, calibration, **options)
    except UserError:
        fastest(shipped, cluster)
        raise


def fastest(rows: list[Alternative], cluster: Cluster) -> Alternative:
    """The row with the least seconds that `check` has no error about. Raises UserError if nothing fits."""
    for row in sorted((row for row in rows if row.forecast), key=lambda row: row.forecast.makespan_s):
        if not any(finding.severity == "error" for finding in check(row.program)):
            return row
    tight = [row for row in rows if row.missing_bytes > 0]
    mend = "larger ones, or lower micro_batch, data.max_prompt or generation.max_new_tokens"
    if not tight:
        raise UserError(f"there is no plan for {cluster}: {rows[0].note}")
    best = min(tight, key=lambda row: row.missing_bytes)
    smallest = min(node.device_bytes for node in cluster.nodes if node.device_bytes)
    enough = ceil(cluster.num_devices * (1 + best.missing_bytes / smallest))
    raise UserError(
        f"nothing fits {cluster}: even {best.name} lacks {format_bytes(best.missing_bytes)} on a device of "
        f"{format_bytes(smallest)}; use about {enough:,} such devices, {mend}"
    )


# ---- what is shown ---------------------------------------------------------------------------------------------------


def show(rows: list[Alternative], calibration: Calibration) -> str:
    """Seconds, waste and bytes of every row; then of each call its seconds and what limits it."""
    first = [("plan", "seconds", "bubble", "peak", "about it")]
    for row in rows:
        if row.forecast is None:
            first.append((row.name, "-", "-", "-", row.note))
            continue
        peak = format_bytes(most_bytes(row.forecast))
        words = ", ".join(filter(None, (row.note, TIGHT if memory(row.program) else "")))
        first.append((row.name, f"{row.forecast.makespan_s:.4g}", f"{abs(bubble(row.forecast)):.0%}", peak, words))
    shown = [row for row in rows if row.forecast]
    calls = [call.name for call in shown[0].program.workload.workflow.placed_calls] if shown else []
    second = [("plan", *calls)]
    for row in shown:
        seconds, limit = call_s(row.forecast), limits(row.program, calibration)
        second.append((row.name, *(f"{seconds[call]:.3g} {limit[call]}" for call in calls)))
    heading = "Seconds of each call in an iteration, and what limits it"
    return "\n".join([table(first), "", heading, table(second)])


def module_source(row: Alternative, config: Config, calibration: Calibration, overrides: list[str]) -> str:
    """The row as a strategy module, with its forecast on top. The same on every rank that plans the same."""
    program, seconds, limit = row.program, call_s(row.forecast), limits(row.program, calibration)
    about = (
        "Written by `python -m rlhf_spmd plan`; edit it like any strategy. The forecast is by the constants of "
        f"calibration {calibration.name}, for devices of type {', '.join(program.cluster.device_types)}. One of them "
        f"would hold {format_bytes(most_bytes(row.forecast))} at most."
        + (f" Planned with {' '.join(overrides)}." if overrides else "")
    )
    cells = [("call", "seconds", "limited by", "ranks", "layout")]
    for name, layout in program.placement.layouts.items():
        ranks = format_ranks(layout.ranks)
        ranks = ranks if len(ranks) < 30 else f"{len(layout.ranks)} of them"
        cells.append((name, f"{seconds[name]:.4g}", limit[name], ranks, str(layout)))
    lines = [
        f"{row.name}: {row.forecast.makespan_s:.4g} s per iteration of {config.preset} on {program.cluster}.",
        "",
        *wrap(about, MAX_LINE, break_long_words=False, break_on_hyphens=False),
        "",
        table(cells),
    ]
    return strategy_source(program.placement, program.workload, program.cluster, "\n".join(lines))


def records(found: Forecast) -> list[dict[str, object]]:
    """A forecast in the form of trace.Tracer.to_records, for the same drawing as a measured run's."""
    cluster, spans_of = found.program.cluster, []
    began = iter(runs(found))
    for rank, (steps, times) in enumerate(zip(found.program.instructions, found.times, strict=True)):
        spans: list[list[object]] = []
        for step, (begin_s, end_s) in zip(steps, times, strict=True):
            if isinstance(step, Run):
                came_s = next(began)[2]
                spans.append([f"wait for {step.group}", "wait", begin_s, came_s, 0, {}])
                spans.append([step.call, "compute", came_s, end_s, 0, {}])
            elif isinstance(step, Wait):
                spans.append([f"wait {found.program.transfers[step.transfer].what}", "wait", begin_s, end_s, 0, {}])
            elif isinstance(step, Load):
                spans.append([f"load {step.model}", "transfer", begin_s, end_s, 0, {}])
            elif isinstance(step, Agree):
                spans.append([f"agree on {step.what}", "wait", begin_s, end_s, 0, {}])  # sends next to nothing
        taken = [span for span in spans if span[2] < span[3]]
        spans_of.append({"rank": rank, "host": f"node {cluster.node_of(rank)}", "spans": taken})
    return spans_of


def draw(row: Alternative, path: str, *, title: str) -> None:
    """The timeline of a forecast as a picture."""
    try:
        from rlhf_spmd.runtime.run.timeline import write_png

        workflow = row.program.workload.workflow
        write_png(path, records(row.forecast), title=title, workflow=workflow, most_lanes=MOST_LANES)
    except ImportError as error:
        raise UserError(f"--timeline needs matplotlib ({error}): pip install matplotlib") from None


def _where(parsed: argparse.Namespace, cluster: Cluster) -> list[str]:
    """The options of `check` that mean the same cluster, algorithm and models."""
    words = ["--cluster", parsed.cluster] if parsed.cluster else ["--layout", str(cluster)]
    words += [] if parsed.cluster else ["--device-type", cluster.nodes[0].device]
    given = {"--algorithm": parsed.algorithm, "--preset": parsed.preset, "--model": parsed.model}
    return [*words, *(word for name, value in given.items() if value for word in (name, value))]


def _write(path: Path, source: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}; give another --out FILE.py") from None


# ---- train --strategy auto -------------------------------------------------------------------------------------------


def auto(config: Config, workload: Workload, cluster: Cluster, calibration: Calibration | None) -> Strategy:
    """The fastest plan as a strategy; its source is the module that the plan verb would write. Deterministic, so every
    rank of a world finds the same."""
    refuse_options(config)
    if calibration is None:
        kinds = ", ".join(cluster.device_types)
        raise UserError(f"--strategy auto needs a calibration, and none of {kinds} is shipped; give --calibration FILE")
    shipped = [beside(name, workload, cluster, calibration) for name in COMPARED]
    found = searched(shipped, workload, cluster, calibration, method="two_phase")  # the exact one looks at the clock
    winner = fastest(numbered(found) + shipped, cluster)
    return strategy_of("auto", module_source(winner, config, calibration, []))


def strategy_of(name: str, source: str) -> Strategy:
    """A strategy from the source that module_source() wrote."""
    module = ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
    return Strategy(name, source, module.place)


# ---- --measure-top ---------------------------------------------------------------------------------------------------


def measure(world: Any, parsed: argparse.Namespace) -> None:
    """The verb on the ranks of a world: the best plans are run for a few iterations, and the quickest wins. Rank 0
    plans and prints. Raises UserError as run() does."""
    from rlhf_spmd.runtime.world.devices import check_program, describe_device

    told: list[list[Any]] = []
    with world.together("planning"):
        config, workload, cluster, calibration = read(parsed, f"{world.num_nodes}x{world.size // world.num_nodes}")
        if cluster.num_devices != world.size:
            raise UserError(f"--measure-top runs the plans on these {world.size} ranks, and {cluster} has others")
        if not config.main_folder:
            raise UserError(f"preset {config.preset} has no weights to run with; pass --model FOLDER")
        if world.rank == 0:
            out = _files(parsed, config, cluster)
            rows, found = rows_of(parsed, workload, cluster, calibration)
            best = sorted((row for row in rows if row.forecast), key=lambda row: row.forecast.makespan_s)
            best = [row for row in best if not any(one.severity == "error" for one in check(row.program))]
            told = [[row.name, module_source(row, config, calibration, parsed.overrides)] for row in best]
            told = told[: parsed.measure_top]
            print(show(rows, calibration), flush=True)
    world.use_device(config.device)
    told = world.bcast(told, what="the plans")
    with world.together("compiling the plans"):
        programs = [strategy_of(name, source).compile(workload, cluster, {}) for name, source in told]
        for program in programs:
            check_program(world.computes, program)
    world.set_deadline(config.deadline_s)
    world.start_torch(*communicators(programs))

    from rlhf_spmd.runtime.run.time_plans import iteration_s

    seconds = [iteration_s(config, program, world) for program in programs]
    if world.rank > 0:
        return
    first = min(range(len(told)), key=seconds.__getitem__)
    with_forecast = [("plan", "forecast s", "measured s")]
    for (name, _), row, measured_s in zip(told, best, seconds, strict=False):
        with_forecast.append((name, f"{row.forecast.makespan_s:.4g}", f"{measured_s:.4g}"))
    _write(out, told[first][1])
    where = describe_device(world.computes, world.size)
    print(f"\nSeconds of an iteration, as measured here ({where})\n{table(with_forecast)}")
    print(f"\nThe quickest, {told[first][0]}, is written to {out}")
    measured = {name: one_s for (name, _), one_s in zip(told, seconds, strict=True)}
    result = {"name": told[first][0], "out": str(out), "forecast_s": best[first].forecast.makespan_s}
    print(json.dumps(result | {"measured_s": seconds[first], "gap": found.gap, "plans": measured, "ok": True}))
