"""The plan subcommand: searches placements, compares the best with the shipped strategies, and writes the winner as a
module.

Needs neither torch nor MPI. `train --strategy auto` plans by the same functions.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_spmd.command_line.outputs import refuse_existing, save
from rlhf_spmd.command_line.plans import (
    AHEAD,
    KEEP,
    Alternative,
    fastest,
    module_source,
    planned,
    plans_table,
    ranked,
    strategy_of,
)
from rlhf_spmd.command_line.words import read
from rlhf_spmd.config.options import Config, make_workload
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.output import print_json, table_width
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.program.transfers import communicators
from rlhf_spmd.plan.text.program_listing import table
from rlhf_spmd.runtime.pictures.forecast_spans import spans_of_forecast

COUNTED = 3  # measured iterations, after one that warms up; the same for all plans, because responses differ in length
MOST_LANES = 8  # of a timeline; with more ranks, those that do the same share a lane


def run(parsed: argparse.Namespace) -> int:
    """Plans, prints tables and a line of JSON, and writes the winner. Returns the exit status. Raises UserError."""
    config, cluster, calibration = read(parsed)
    assert calibration is not None, "required"
    out, workload, began = _out(parsed, config, cluster), make_workload(config), time.perf_counter()
    rows, misfits, result = planned(config, workload, cluster, calibration, top=parsed.top, **_search_options(parsed))
    winner = fastest(_eligible(rows, parsed), cluster)
    simulate_s = time.perf_counter() - began - result.search_s  # for the best plans and the shipped strategies
    where = f"{config.title} on {cluster} ({', '.join(cluster.device_types)})"
    took = f"{result.num_scored:,} plans scored in {result.search_s:.1f} s, programs simulated in {simulate_s:.1f} s"
    if result.gap:
        took += f"; the search ended at its budget, so a plan that is up to {result.gap:.1%} faster may be missing"
    elif result.gap is not None:
        took += "; gap 0.0%: of the searched meshes, grids and micro-batches, none is faster at the level of calls"
    if result.gap is not None:
        took += ", among those whose iterations do not overlap"
    print(f"{where}, seconds by calibration {calibration.name}: {took}")
    if calibration.sources:
        print(f"sources of its constants: {calibration.sources_text}")
    print(plans_table(rows, misfits, calibration, table_width()))
    source = module_source(winner, config, calibration, _words(parsed))
    save(out, lambda path: path.write_text(source, encoding="utf-8"))
    print(f"\nThe fastest, {winner.name}, is written to {out}, which check, forecast and train --strategy take")
    if parsed.timeline:
        from rlhf_spmd.runtime.pictures.timeline import write_png

        spans, title = spans_of_forecast(winner.forecast), f"Forecast of {winner.name}: {where}"
        draw = partial(write_png, records=spans, title=title, workflow=workload.workflow, most_lanes=MOST_LANES)
        save(Path(parsed.timeline), draw)
    values = {
        "name": winner.name,
        "out": str(out),
        "forecast_s": winner.forecast.makespan_s,
        "plan_s": result.search_s,
        "simulate_s": simulate_s,
        "gap": result.gap,
        "num_scored": result.num_scored,
        "plans": {row.name: row.forecast.makespan_s for row in rows} | dict.fromkeys(misfits),
        "ahead": winner.program.placement.ahead,
        "chain": winner.program.chains,
        "ok": True,
    }
    print_json(values, parsed.json)
    return 0


def _search_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of planned() that a command line names."""
    return {"aheads": AHEAD[parsed.ahead], "method": parsed.method, "keep": max(parsed.top, KEEP)}


def _eligible(rows: Sequence[Alternative], parsed: argparse.Namespace) -> list[Alternative]:
    """Returns the rows that draw as far ahead as was asked for."""
    return [row for row in rows if row.program.placement.ahead in AHEAD[parsed.ahead]]


def _words(parsed: argparse.Namespace) -> list[str]:
    """Returns what a plan was made with, for its docstring."""
    return [*(["--config", parsed.config] if parsed.config else []), *parsed.overrides]


def _out(parsed: argparse.Namespace, config: Config, cluster: Cluster) -> Path:
    """Returns the file of the winner. Raises UserError if it or the picture would replace a file."""
    out = Path(parsed.out or f"runs/plan-{config.preset}-{cluster}.py")
    refuse_existing(parsed, out, *([Path(parsed.timeline)] if parsed.timeline else []))
    return out


# ---- --measure-top ---------------------------------------------------------------------------------------------------


def measure(world: Any, parsed: argparse.Namespace) -> None:
    """Runs the best plans for a few iterations on the ranks of a world; the fastest wins. Rank 0 plans and prints.
    Raises UserError as run() does."""
    from rlhf_spmd.runtime.profile.calibration_probe import at_hand
    from rlhf_spmd.runtime.world.devices import check_program, describe_device

    sources: dict[str, str] = {}  # of the plans, by name
    with world.together("planning"):
        config, cluster, calibration = read(parsed, f"{world.num_nodes}x{world.size // world.num_nodes}")
        assert calibration is not None, "required"
        if cluster.num_devices != world.size:
            raise UserError(f"--measure-top runs the plans on these {world.size} ranks, and {cluster} has others")
        if not config.main_folder:
            raise UserError(f"preset {config.preset} has no weights to run with; pass --model FOLDER")
        out, workload = _out(parsed, config, cluster), make_workload(config)
        if world.rank == 0:
            rows, misfits, result = planned(config, workload, cluster, calibration, **_search_options(parsed))
            best = list(ranked(_eligible(rows, parsed)))[: parsed.measure_top]
            sources = {row.name: module_source(row, config, calibration, _words(parsed)) for row in best}
            shown = [*rows[: parsed.top], *rows[len(result.plans) :], *best]
            rows = [row for row in rows if row in shown]
            print(plans_table(rows, misfits, calibration, table_width()), flush=True)
    world.use_device(config.device)
    sources = world.bcast(sources, what="the plans")
    with world.together("compiling the plans"):
        programs = [strategy_of(name, source).compile(workload, cluster, {}) for name, source in sources.items()]
        for program in programs:
            check_program(world.computes, program)
    world.set_deadline(config.deadline_s)
    world.start_torch(*communicators(programs))
    seconds = {name: iteration_s(config, program, world) for name, program in zip(sources, programs, strict=True)}
    here = at_hand(world, config, programs[0], calibration, COUNTED * sum(seconds.values()))
    if world.rank > 0:
        return
    first = min(seconds, key=seconds.__getitem__)
    forecasts = {row.name: forecast(row.program, here.calibration).makespan_s for row in best if not here.why_not}
    measured = [("plan", "forecast s", "measured s")]
    for name, measured_s in seconds.items():
        measured.append((name, f"{forecasts[name]:.4g}" if forecasts else "-", f"{measured_s:.4g}"))
    save(out, lambda path: path.write_text(sources[first], encoding="utf-8"))
    where = describe_device(world.computes, world.size)
    print(f"\nSeconds of an iteration, as measured here ({where})\n{table(measured, table_width())}")
    if here.why_not:
        print(f"No forecast beside the seconds: {here.why_not}")
    print(f"\nThe fastest, {first}, is written to {out}")
    values = {"name": first, "out": str(out), "forecast_s": forecasts.get(first), "measured_s": seconds[first]}
    print_json(values | {"gap": result.gap, "plans": seconds, "ok": True}, parsed.json)


def iteration_s(config: Config, program: Program, world: Any) -> float:
    """Measures the median seconds of an iteration, of the slowest rank; the same on every rank. In a chain these are
    from the end of one iteration on a rank to the end of the next. The world must have the program's groups. Frees the
    models before it returns."""
    from rlhf_spmd.runtime.execute.executor import Executor
    from rlhf_spmd.runtime.run.prepare import make_iteration, prepare
    from rlhf_spmd.runtime.world.trace import Tracer, clock_of

    job = prepare(config, program, world).job
    executor = Executor(job, Tracer(world.rank, clock=clock_of(world.device)))
    before = None  # of a run that draws ahead: the batch that trains in the next iteration; in a chain the last one
    seconds = []
    for number in range(1 + COUNTED):  # one ahead, number 0 only draws
        data = make_iteration(job, number)
        if not program.chains:
            world.barrier("the start of an iteration")
        began = time.perf_counter()
        executor.iteration(data, before)
        before = data if program.overlaps else None
        seconds.append(time.perf_counter() - began)
    if program.chains:
        executor.iteration(None, before)
    slowest = [max(of_ranks) for of_ranks in zip(*world.allgather(seconds, "the seconds of iterations"), strict=True)]
    del job, executor, data, before
    gc.collect()
    return statistics.median(slowest[1:])
