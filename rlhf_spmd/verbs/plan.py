"""The plan verb: searches placements, compares the best with the shipped strategies, and writes the winner as a module.

Needs neither torch nor MPI. `train --strategy auto` plans by the same functions.
"""

import argparse
import json
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import wrap
from types import ModuleType
from typing import Any

from rlhf_spmd.config.options import Config, evaluated, make_workload
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import is_file, is_folder
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.machines.cluster_calibration import calibration_for, with_reserve
from rlhf_spmd.pages.strategy import Strategy, load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.bottleneck import limits
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.cost.forecast_summary import bubble, call_s, runs
from rlhf_spmd.plan.cost.memory_timeline import most_bytes
from rlhf_spmd.plan.cost.simulate import Forecast
from rlhf_spmd.plan.program.instructions import Agree, Load, Program, Run, Wait, communicators
from rlhf_spmd.plan.proof.memory_check import memory
from rlhf_spmd.plan.search.planner import SearchResult, name_of, search
from rlhf_spmd.plan.text.program_listing import call_table, format_bytes, table
from rlhf_spmd.plan.text.strategy_module import MAX_LINE, strategy_source
from rlhf_spmd.plan.workload import Workload
from rlhf_spmd.verbs.check import check_both, config_words, evaluate_of, read_config_and_cluster
from rlhf_spmd.verbs.fitting_strategies import (
    COMPARED,
    Evaluate,
    missing_bytes,
    no_evaluation,
    options_to_try,
    too_large,
)

TIGHT = "keys and values do not all fit: will be slower"  # the warning of memory_check.memory, shortened
KEEP = 20  # plans that are simulated
NEAR = 1.15  # forecasts err by about 15%, so rows within this factor of the fastest forecast may be faster
MOST_LANES = 8  # of a timeline; with more ranks, those that do the same share a lane


@dataclass(frozen=True, slots=True)
class Alternative:
    """A row of the table: a plan or a shipped strategy with its forecast, or the reason why it has none."""

    name: str
    program: Program | None
    forecast: Forecast | None
    note: str = ""  # options that were chosen, or why there is no forecast
    missing_bytes: int = 0  # of a device, where it does not fit
    evaluation: Program | None = None  # of the run


def run(parsed: argparse.Namespace) -> int:
    """Plans, prints tables and a line of JSON, writes the winner -> the exit status. Raises UserError."""
    config, workload, cluster, calibration = read(parsed)
    out = _out(parsed, config, cluster)
    began = time.perf_counter()
    rows, found = alternatives(workload, cluster, calibration, **_evaluations(config), **_search_options(parsed))
    winner = fastest(rows, cluster)
    plan_s = found.search_s
    simulate_s = time.perf_counter() - began - plan_s  # for the best plans and the shipped strategies
    where = f"{config.title} on {cluster} ({', '.join(cluster.device_types)})"
    took = f"{found.num_scored:,} plans scored in {plan_s:.1f} s, programs simulated in {simulate_s:.1f} s"
    if found.gap:
        took += f"; the budget ended before the proof, so one may be missing that is up to {found.gap:.1%} faster"
    print(f"{where}, seconds by calibration {calibration.name}: {took}")
    if calibration.sources:
        print(f"constants {calibration.sources_text}")
    print(plans_table(rows, calibration))
    source = module_source(winner, config, calibration, _words(parsed))
    save(out, lambda path: path.write_text(source, encoding="utf-8"))
    print(f"\nThe fastest, {winner.name}, is written to {out}; try it:")
    print(f"  python -m rlhf_spmd {shlex.join(['check', str(out), *_check_words(parsed, cluster), *parsed.overrides])}")
    if parsed.timeline:
        from rlhf_spmd.runtime.pictures.timeline import write_png

        spans, title = records(winner.forecast), f"Forecast of {winner.name}: {where}"
        draw = partial(write_png, records=spans, title=title, workflow=workload.workflow, most_lanes=MOST_LANES)
        save(Path(parsed.timeline), draw)
    seconds = {row.name: row.forecast.makespan_s if row.forecast else None for row in rows}
    result = {"name": winner.name, "out": str(out), "forecast_s": winner.forecast.makespan_s, "plan_s": plan_s}
    result |= {"simulate_s": simulate_s, "gap": found.gap, "num_scored": found.num_scored, "plans": seconds, "ok": True}
    print(json.dumps(result))
    return 0


def _words(parsed: argparse.Namespace) -> list[str]:
    """What a plan was made with, for its docstring."""
    return [*(["--config", parsed.config] if parsed.config else []), *parsed.overrides]


def _search_options(parsed: argparse.Namespace) -> dict[str, Any]:
    return {"top": parsed.top, "method": parsed.method, "seed": parsed.seed, "keep": max(parsed.top, KEEP)}


def _evaluations(config: Config) -> dict[str, Any]:
    """What alternatives() must know of the evaluations of a run. Raises UserError."""
    tokens = evaluated(config).generation.max_new_tokens if config.eval.prompts else 0
    return {"evaluate": evaluate_of(config), "evaluated_tokens": tokens}


def _out(parsed: argparse.Namespace, config: Config, cluster: Cluster) -> Path:
    """The file of the winner. Raises UserError if it or the picture would replace a file."""
    out = Path(parsed.out or f"runs/plan-{config.preset}-{cluster}.py")
    refuse_existing(parsed, out, *([Path(parsed.timeline)] if parsed.timeline else []))
    return out


def refuse_existing(parsed: argparse.Namespace, *paths: Path) -> None:
    """Raises UserError for an output file that exists, unless --overwrite is given."""
    for path in paths:
        if (is_file(path) or is_folder(path)) and not parsed.overwrite:
            raise UserError(f"{path} exists already; pass --overwrite, or name another file")


def save(path: Path, write: Callable[[Path], object]) -> None:
    """Writes an output file, and its folder if need be. Raises UserError if that fails or matplotlib is missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}; name another file") from None
    except ImportError as error:
        raise UserError(f"a picture needs matplotlib ({error}): pip install matplotlib") from None


def read(parsed: argparse.Namespace, layout: str = "1x4") -> tuple[Config, Workload, Cluster, Calibration]:
    """What to plan for; layout: the default. Raises UserError if something does not exist or fit together."""
    config, cluster, calibration = read_calibrated(parsed, layout)
    refuse_options(config)
    return config, make_workload(config), cluster, calibration


def read_calibrated(
    parsed: argparse.Namespace, layout: str = "1x4", *, required: bool = True
) -> tuple[Config, Cluster, Calibration | None]:
    """The configuration, the cluster and its calibration; required: None is an error. Raises UserError as read()."""
    devices = list(load_calibration(parsed.calibration).devices) if parsed.calibration else []
    config, cluster = read_config_and_cluster(parsed, layout, devices[0] if len(devices) == 1 else None)
    calibration = calibration_for(parsed.calibration, cluster, required=required)
    return config, with_reserve(cluster, config.reserve, calibration), calibration


def refuse_options(config: Config) -> None:
    """Raises UserError if there are options of a strategy, because the planner makes its own."""
    if config.strategy:
        first = next(iter(config.strategy))
        raise UserError(f"strategy.{first} is an option of a strategy, but the planner chooses every layout; drop it")


# ---- what is compared ------------------------------------------------------------------------------------------------


def alternatives(
    workload: Workload,
    cluster: Cluster,
    calibration: Calibration,
    *,
    evaluate: Evaluate = no_evaluation,
    top: int | None = None,
    **options: Any,
) -> tuple[list[Alternative], SearchResult]:
    """The best plans of search() with these options (top: how many; None: all), then the shipped strategies; and the
    result of the search. evaluate: makes the program of the run's evaluations, which must fit, too. Raises UserError if
    nothing fits."""
    shipped = [fitted(name, workload, cluster, calibration, evaluate) for name in COMPARED]
    try:
        found = search(workload, cluster, calibration, **options)
    except UserError as error:
        raise UserError(f"{error}. {_nearest(shipped)}") from None
    plans = [
        Alternative(f"plan {number} ({plan.name})", plan.program, plan.forecast, evaluation=evaluate(plan.program))
        for number, plan in enumerate(found.plans[:top], start=1)
    ]
    return plans + shipped, found


def fitted(
    name: str, workload: Workload, cluster: Cluster, calibration: Calibration, evaluate: Evaluate = no_evaluation
) -> Alternative:
    """A shipped strategy with the first options with which it fits; else why it does not."""
    strategy, refused, short = load_strategy(name), "", {}
    for options in options_to_try(name, workload, cluster):
        words = " ".join(f"{option}={value}" for option, value in options.items())
        try:
            program = strategy.compile(workload, cluster, options)
            evaluation = evaluate(program)
        except UserError as error:
            refused = refused or str(error).removeprefix(f"strategy {name}: ")
            continue
        if not too_large(program, evaluation):
            return Alternative(name, program, forecast(program, calibration), words, evaluation=evaluation)
        short[words] = missing_bytes(program, evaluation)
    if not short:
        return Alternative(name, None, None, refused)
    words = min(short, key=short.__getitem__)
    with_options = f" with {words}" if words else ""
    note = f"does not fit: a device lacks {format_bytes(short[words])}{with_options}"
    return Alternative(name, None, None, note, short[words], evaluation)


def ranked(rows: list[Alternative]) -> Iterator[Alternative]:
    """The rows that `check` has no error about, fastest first."""
    for row in sorted((row for row in rows if row.forecast), key=lambda row: row.forecast.makespan_s):
        if not any(finding.severity == "error" for finding in check_both(row.program, row.evaluation)):
            yield row


def most_promising(rows: list[Alternative], number: int) -> list[Alternative]:
    """The rows that are worth measuring, fastest first. Of the rows that are forecast to take at most NEAR times the
    seconds of the first one: the first, the best shipped strategy, and the best of each kind of placement (name_of()),
    because placements of a kind differ less than their forecasts err. Then the next ones."""
    order = list(ranked(rows))
    first: dict[str, str] = {}  # what a row is the best of -> its name
    for row in order:
        if row.forecast.makespan_s <= NEAR * order[0].forecast.makespan_s:
            program = row.program
            if row.name in COMPARED:
                first.setdefault("shipped", row.name)
            first.setdefault(name_of(program.placement, program.workload, program.cluster), row.name)
    names = dict.fromkeys([order[0].name, *([first["shipped"]] if "shipped" in first else []), *first.values()])
    chosen = list(names | dict.fromkeys(row.name for row in order))[:number]
    return [row for row in order if row.name in chosen]


def fastest(rows: list[Alternative], cluster: Cluster) -> Alternative:
    """The first of ranked(). Raises UserError if nothing fits."""
    if best := next(ranked(rows), None):
        return best
    raise UserError(f"there is no plan for {cluster}. {_nearest(rows)}")


def _nearest(shipped: list[Alternative]) -> str:
    """Which of the shipped strategies fits best, as a sentence."""
    if best := next(ranked(shipped), None):
        words = f" with {best.note}" if best.note else ""
        return f"Strategy {best.name}{words} fits if generation decodes fewer sequences at a time"
    tight = [row for row in shipped if row.missing_bytes > 0]
    if not tight:
        return shipped[0].note
    least = min(tight, key=lambda row: row.missing_bytes)
    missing = format_bytes(least.missing_bytes)
    return f"Of the shipped strategies, {least.name} lacks the least, {missing} even with the smallest KV cache"


# ---- what is shown ---------------------------------------------------------------------------------------------------


def plans_table(rows: list[Alternative], calibration: Calibration) -> str:
    """Seconds, waste and bytes of every row; then the seconds of each call and what limits it."""
    shown = [row for row in rows if row.forecast]
    limited = bool(shown) and any(node.device_bytes for node in shown[0].program.cluster.nodes)
    first = [("plan", "seconds", "bubble", "peak", *(("reserve", "device") if limited else ()), "about it")]
    for row in rows:
        if row.forecast is None:
            first.append((row.name, *["-"] * (len(first[0]) - 2), row.note))
            continue
        sizes = [format_bytes(size) for size in (most_bytes(row.forecast), *(_device(row.program) if limited else ()))]
        words = ", ".join(filter(None, (row.note, TIGHT if memory(row.program) else "")))
        first.append((row.name, f"{row.forecast.makespan_s:.4g}", f"{abs(bubble(row.forecast)):.0%}", *sizes, words))
    calls = [call.name for call in shown[0].program.workload.workflow.placed_calls] if shown else []
    second = [("plan", *calls)]
    for row in shown:
        seconds, limit = call_s(row.forecast), limits(row.program, calibration)
        second.append((row.name, *(f"{seconds[call]:.3g} {limit[call]}" for call in calls)))
    heading = "Seconds of each call in an iteration, and what limits it"
    return "\n".join([table(first), "", heading, table(second)])


def _device(program: Program) -> tuple[int, int]:
    """The reserved bytes and the memory of the device on which a program may use the least."""
    node = min((node for node in program.cluster.nodes if node.device_bytes), key=lambda node: node.usable_bytes)
    return node.device_bytes - node.usable_bytes, node.device_bytes


def module_source(row: Alternative, config: Config, calibration: Calibration, overrides: list[str]) -> str:
    """The row as a strategy module, with its forecast in the docstring. Deterministic."""
    program, seconds, limit = row.program, call_s(row.forecast), limits(row.program, calibration)
    about = (
        "Written by `python -m rlhf_spmd plan`; edit it like any strategy. The forecast is by the constants of "
        f"calibration {calibration.name}, for devices of type {', '.join(program.cluster.device_types)}. One of them "
        f"would hold {format_bytes(most_bytes(row.forecast))} at most."
        + (f" Planned with {' '.join(overrides)}." if overrides else "")
    )
    lines = [
        f"{row.name}: {row.forecast.makespan_s:.4g} s per iteration of {config.title} on {program.cluster}.",
        "",
        *wrap(about, MAX_LINE, break_long_words=False, break_on_hyphens=False),
        "",
        call_table(program, seconds, limit),
    ]
    return strategy_source(program.placement, program.workload, program.cluster, "\n".join(lines))


def records(found: Forecast) -> list[dict[str, object]]:
    """A forecast in the form of trace.Tracer.to_records, so that it is drawn like a measured run."""
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


def _check_words(parsed: argparse.Namespace, cluster: Cluster) -> list[str]:
    """The options of `check` that mean the same cluster, algorithm and models."""
    words = ["--layout", str(cluster), "--device-type", cluster.nodes[0].device]
    words = ["--cluster", parsed.cluster] if parsed.cluster else words
    return words + config_words(parsed, parsed.preset)


# ---- train --strategy auto -------------------------------------------------------------------------------------------


def auto(config: Config, workload: Workload, cluster: Cluster, calibration: Calibration) -> Strategy:
    """The fastest plan as a strategy whose source is the module that the plan verb would write. Deterministic: every
    rank finds the same one. Raises UserError."""
    refuse_options(config)
    options = {"method": "two_phase"} | _evaluations(config)  # all ranks plan, and its work varies the least
    rows, _ = alternatives(workload, cluster, calibration, **options)
    return strategy_of("auto", module_source(fastest(rows, cluster), config, calibration, []))


def strategy_of(name: str, source: str) -> Strategy:
    """A strategy from the source that module_source() wrote."""
    module = ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
    return Strategy(name, source, module.place)


# ---- --measure-top ---------------------------------------------------------------------------------------------------


def measure(world: Any, parsed: argparse.Namespace) -> None:
    """The verb on the ranks of a world: runs the best plans for a few iterations; the fastest wins. Rank 0 plans and
    prints. Raises UserError as run() does."""
    from rlhf_spmd.runtime.world.devices import check_program, describe_device

    told: list[list[Any]] = []
    with world.together("planning"):
        config, workload, cluster, calibration = read(parsed, f"{world.num_nodes}x{world.size // world.num_nodes}")
        if cluster.num_devices != world.size:
            raise UserError(f"--measure-top runs the plans on these {world.size} ranks, and {cluster} has others")
        if not config.main_folder:
            raise UserError(f"preset {config.preset} has no weights to run with; pass --model FOLDER")
        if world.rank == 0:
            out = _out(parsed, config, cluster)
            options = _search_options(parsed) | _evaluations(config) | {"top": None}
            rows, found = alternatives(workload, cluster, calibration, **options)
            best = most_promising(rows, parsed.measure_top)
            shown = {row.name for row in rows[: parsed.top] + rows[len(found.plans) :] + best}
            rows = [row for row in rows if row.name in shown]
            told = [[row.name, module_source(row, config, calibration, _words(parsed))] for row in best]
            print(plans_table(rows, calibration), flush=True)
    world.use_device(config.device)
    told = world.bcast(told, what="the plans")
    with world.together("compiling the plans"):
        programs = [strategy_of(name, source).compile(workload, cluster, {}) for name, source in told]
        for program in programs:
            check_program(world.computes, program)
    world.set_deadline(config.deadline_s)
    world.start_torch(*communicators(programs))

    from rlhf_spmd.runtime.run.measure_plans import iteration_s

    seconds = [iteration_s(config, program, world) for program in programs]
    if world.rank > 0:
        return
    first = min(range(len(told)), key=seconds.__getitem__)
    with_forecast = [("plan", "forecast s", "measured s")]
    for (name, _), row, measured_s in zip(told, best, seconds, strict=True):
        with_forecast.append((name, f"{row.forecast.makespan_s:.4g}", f"{measured_s:.4g}"))
    save(out, lambda path: path.write_text(told[first][1], encoding="utf-8"))
    where = describe_device(world.computes, world.size)
    print(f"\nSeconds of an iteration, as measured here ({where})\n{table(with_forecast)}")
    print(f"\nThe fastest, {told[first][0]}, is written to {out}")
    measured = {name: one_s for (name, _), one_s in zip(told, seconds, strict=True)}
    result = {"name": told[first][0], "out": str(out), "forecast_s": best[first].forecast.makespan_s}
    print(json.dumps(result | {"measured_s": seconds[first], "gap": found.gap, "plans": measured, "ok": True}))
