"""The best plans and the shipped strategies side by side, each with its forecast, and the fastest as a strategy."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import fill
from types import ModuleType
from typing import Any

from rlhf_spmd.command_line.checks import check_both, evaluate_of
from rlhf_spmd.command_line.fitting_strategies import COMPARED, Evaluate, first_fit, no_evaluation
from rlhf_spmd.config.options import Config, evaluated
from rlhf_spmd.errors import UserError
from rlhf_spmd.files import progress
from rlhf_spmd.pages.strategy import Strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.bottleneck import limits
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.cost.forecast_summary import bubble, call_s
from rlhf_spmd.plan.cost.memory import most_bytes
from rlhf_spmd.plan.cost.simulate import Forecast
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.proof.memory_check import memory
from rlhf_spmd.plan.search.planner import SEPARATION_AHEAD, SearchResult, search
from rlhf_spmd.plan.text.program_listing import call_table, format_bytes, table
from rlhf_spmd.plan.text.strategy_module import MAX_LINE, strategy_source
from rlhf_spmd.plan.workload import Workload

TIGHT = "generation decodes fewer sequences at a time"  # the warning of memory_check.memory, shortened
OVERLAP = "iterations overlap"  # of a chain
KEEP = 20  # plans that are simulated
AUTO_BUDGET = 400_000  # steps of the exact search of `auto`, which each rank makes; without a proof, two_phase follows
AHEAD = {"0": (0,), "1": (1,), "auto": (0, 1)}  # plan --ahead


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan or a shipped strategy that fits.

    note: options that were chosen.
    evaluation: the program of the run's evaluations.
    """

    name: str
    program: Program
    forecast: Forecast
    note: str = ""
    evaluation: Program | None = None


Misfits = Mapping[str, str]  # shipped strategies that do not fit, and why
SUMMED = ("num_scored", "search_s", "processor_s", "simulate_s")  # of two results of search()


def alternatives(
    workload: Workload,
    cluster: Cluster,
    calibration: Calibration,
    *,
    evaluate: Evaluate = no_evaluation,
    top: int | None = None,
    aheads: Sequence[int] = (0,),
    **options: Any,
) -> tuple[list[Alternative], Misfits, SearchResult]:
    """Returns the best plans of search() with these options, then the shipped strategies that fit; those that do not;
    and the result of the search. Raises UserError if nothing fits.

    evaluate: makes the program of the run's evaluations, which must fit, too.
    top: how many plans, besides the best of each of `aheads`; None: all.
    aheads: what plans may have as Placement.ahead.
    """
    result = searched(workload, cluster, calibration, aheads, **options)
    best = {plan.placement.ahead: plan for plan in reversed(result.plans)}
    rows, misfits = list[Alternative](), dict[str, str]()
    for number, plan in enumerate(result.plans):
        if top is None or number < top or plan is best[plan.placement.ahead]:
            name, evaluation = f"plan {number + 1} ({plan.name})", evaluate(plan.program)
            rows.append(Alternative(name, plan.program, plan.forecast, evaluation=evaluation))
    shipped: dict[str, tuple[str, dict[str, int]]] = {name: (name, {}) for name in COMPARED}
    if 1 in aheads:
        shipped[SEPARATION_AHEAD] = "separation", {"ahead": 1}
    with progress.during("simulating the shipped strategies"):
        for title, (name, more) in shipped.items():
            fit = first_fit(name, workload, cluster, evaluate, **more)
            if fit.program is None:
                misfits[title] = fit.note
            else:
                seconds = forecast(fit.program, calibration)
                rows.append(Alternative(title, fit.program, seconds, fit.note, fit.evaluation))
    return rows, misfits, result


def searched(
    workload: Workload, cluster: Cluster, calibration: Calibration, aheads: Sequence[int], **options: Any
) -> SearchResult:
    """Returns the results of search() for some values of Placement.ahead as one. Where others than the first have no
    plan, there are plans without them. Raises UserError if there are none."""
    result = search(workload, cluster, calibration, say=progress.say, ahead=aheads[0], **options)
    for ahead in aheads[1:]:
        try:
            more = search(workload, cluster, calibration, say=progress.say, ahead=ahead, **options)
        except UserError:
            continue
        plans = sorted((*result.plans, *more.plans), key=lambda plan: plan.forecast.makespan_s)
        sums = {name: getattr(result, name) + getattr(more, name) for name in SUMMED}
        gap = None if result.gap is None else max(result.gap, more.gap or 0.0)
        result = replace(result, plans=tuple(plans), gap=gap, **sums)
    return result


def ranked(rows: Iterable[Alternative]) -> Iterator[Alternative]:
    """Yields the rows that `check` has no error about, fastest first; those that it warns about for want of memory
    come after all others."""
    for row in sorted(rows, key=lambda row: (bool(memory(row.program)), row.forecast.makespan_s)):
        if all(finding.severity != "error" for finding in check_both(row.program, row.evaluation)):
            yield row


def fastest(rows: Iterable[Alternative], cluster: Cluster) -> Alternative:
    """Returns the first of ranked(). Raises UserError if nothing fits."""
    if best := next(ranked(rows), None):
        return best
    raise UserError(f"there is no plan for {cluster} that passes `check`: use more or larger devices")


def plans_table(
    rows: Sequence[Alternative], misfits: Misfits, calibration: Calibration, columns: int | None = None
) -> str:
    """Returns seconds, waste and bytes of every row; then the seconds of each call and what limits it. columns: of
    `table`."""
    calls = list(dict.fromkeys(call.name for row in rows for call in row.program.workload.workflow.placed_calls))
    first: list[tuple[str, ...]] = [("plan", "seconds", "bubble", "peak", "reserve", "device", "note")]
    second: list[tuple[str, ...]] = [("plan", *calls)]
    for row in rows:
        program, seconds, limit = row.program, call_s(row.forecast), limits(row.program, calibration)
        words = (row.note, OVERLAP if program.chains else "", TIGHT if memory(program) else "")
        idle, most = f"{abs(bubble(row.forecast)):.0%}", format_bytes(most_bytes(program))
        first.append(
            (row.name, f"{row.forecast.makespan_s:.4g}", idle, most, *_device(program), ", ".join(filter(None, words)))
        )
        second.append((row.name, *(f"{seconds[call]:.3g} {limit[call]}" if call in seconds else "-" for call in calls)))
    first += [(name, *("-" * 5), note) for name, note in misfits.items()]
    heading = "Seconds of each call in an iteration, and what limits it"
    return "\n".join([table(first, columns), "", heading, table(second, columns)])


def _device(program: Program) -> tuple[str, str]:
    """Returns the reserved bytes and the memory of the device on which a program may use the least."""
    limited = [(node.usable_bytes or 0, node.device_bytes) for node in program.cluster.nodes if node.device_bytes]
    usable, whole = min(limited, default=(0, 0))
    return (format_bytes(whole - usable), format_bytes(whole)) if limited else ("-", "-")


def module_source(row: Alternative, config: Config, calibration: Calibration, overrides: Sequence[str]) -> str:
    """Returns the row as a strategy module, with its forecast in the docstring. Deterministic."""
    program, cluster = row.program, row.program.cluster
    about = (
        "Written by `python -m rlhf_spmd plan`; edit it like any strategy. The forecast is by the constants of "
        f"calibration {calibration.name}, for devices of type {', '.join(cluster.device_types)}. One of them "
        f"would hold {format_bytes(most_bytes(program))} at most."
    )
    if program.chains:
        about += " An iteration begins on some ranks while others still train in the one before."
    if overrides:
        about += f" Planned with {' '.join(overrides)}."
    title = f"{row.name}: {row.forecast.makespan_s:.4g} s per iteration of {config.title} on {cluster}."
    text = fill(about, MAX_LINE, break_long_words=False, break_on_hyphens=False)
    calls = call_table(program, call_s(row.forecast), limits(program, calibration))
    return strategy_source(program.placement, program.workload, cluster, f"{title}\n\n{text}\n\n{calls}")


def planned(
    config: Config, workload: Workload, cluster: Cluster, calibration: Calibration, **options: Any
) -> tuple[list[Alternative], Misfits, SearchResult]:
    """Returns what alternatives() does, with memory for the evaluations of the run. Raises UserError, also for options
    of a strategy, because the planner makes its own."""
    for name in config.strategy:
        raise UserError(f"strategy.{name} is an option of a strategy, but the planner chooses every layout; drop it")
    most = evaluated(config).row_tokens if config.eval.prompts else 0
    evaluate = evaluate_of(config)
    return alternatives(workload, cluster, calibration, evaluate=evaluate, evaluated_tokens=most, **options)


def auto(config: Config, workload: Workload, cluster: Cluster, calibration: Calibration) -> Strategy:
    """Searches for the fastest plan and returns it as a strategy whose source is the module that the plan subcommand
    would write. Deterministic: every rank finds the same one. Raises UserError."""
    rows, *_ = planned(config, workload, cluster, calibration, budget=AUTO_BUDGET)
    return strategy_of("auto", module_source(fastest(rows, cluster), config, calibration, []))


def strategy_of(name: str, source: str) -> Strategy:
    """Returns a strategy from the source that module_source() wrote."""
    module = ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
    return Strategy(name, source, module.place)
