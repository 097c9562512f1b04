"""Finds placements: three methods over one space of candidates with one score, then a simulation of the best ones.

exact: branch and bound (exact.py). two_phase, after APP's planner (arXiv 2312.11819): first placements in the style of
its strategies, then a local search around the best of them. mcmc: ReaL's Markov chain (markov_chain.py). Plans are
sorted by the forecasts of their programs.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import inf
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.calls import Train, is_current
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.cost.seconds import Cost
from rlhf_spmd.plan.cost.simulate import Forecast
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.ahead import with_starts
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.search.budget import Budget
from rlhf_spmd.plan.search.candidates import Allowed, Candidate, Destination, anything
from rlhf_spmd.plan.search.exact import Best, Choice, Space, exact
from rlhf_spmd.plan.search.iteration_model import CallModel
from rlhf_spmd.plan.search.markov_chain import markov_chain
from rlhf_spmd.plan.search.misfit import roomiest, why_none
from rlhf_spmd.plan.search.priors import Meshes, around, least_full, least_memory, on_meshes, priors, priors_in_chain
from rlhf_spmd.plan.validate import ahead_problems, device_problems
from rlhf_spmd.plan.workload import Workload

NUM_STREAMING = 2  # plans that stream for which the fields of STREAMS are chosen
STREAMS = {"decode_mini_batches": (1, 2, 4), "in_flight": (1, 2, 4)}  # and as many as there are mini-batches
METHODS = ("exact", "two_phase", "mcmc")
SEPARATION_AHEAD = "separation, one iteration ahead"
BUDGET = 1_250_000  # steps of the exact search; then it reports the optimality gap
ROOMY_SHARE = 0.4  # of the budget for finding something that fits
NUM_PRIORS = 5  # around which two_phase searches
NUM_CHAINED = 3  # in a chain: priors around which every method searches, and choices that are simulated
NUM_TIGHT = 8  # candidates of a call for which it makes room


@dataclass(frozen=True, slots=True)
class Plan:
    """A proposed placement with the forecast of its program.

    call_level_s: seconds by the call-level model.
    """

    name: str
    placement: Placement
    program: Program
    forecast: Forecast
    call_level_s: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Plans, best first.

    gap: the fraction by which an unexplored placement might be faster in the call-level model of iterations that are
        not a chain; 0.0 if the exact search finished, None if the method proves nothing.
    processor_s: processor time of the search, which other work on the machine does not lengthen.
    """

    plans: tuple[Plan, ...]
    gap: float | None
    num_scored: int
    search_s: float
    processor_s: float
    simulate_s: float


def search(
    workload: Workload,
    cluster: Cluster,
    calibration: Calibration,
    *,
    method: str = "exact",
    keep: int = 20,
    budget: int = BUDGET,
    allowed: Allowed = anything,
    evaluated_tokens: int = 0,
    ahead: int = 0,
    say: Callable[[str], object] = str,
) -> SearchResult:
    """Searches for the best placements of a workload on a cluster. Raises UserError if no placement fits the devices or
    is allowed, the method is unknown, or the calibration lacks a device type.

    keep: how many are compiled and simulated, besides those whose iterations are a chain, and how many are returned.
    budget: steps (budget.py) after which the exact search stops and reports a gap, or the Markov chain ends.
    allowed: the layouts that calls may have.
    evaluated_tokens: the most tokens of a response in evaluations, for which memory is kept; 0: no evaluation.
    ahead: as in Placement; 1: all plans draw one iteration ahead.
    say: called with a text at the start of each phase.
    """
    if method not in METHODS:
        raise UserError(f"unknown search method {method!r}; known: {', '.join(METHODS)}")
    for device in cluster.device_types:
        calibration.require(device)
    if why := "; ".join(device_problems(workload, cluster)):
        raise UserError(why)
    if ahead and (why := "; ".join(ahead_problems(ahead, workload.workflow))):
        raise UserError(why)
    workload = with_starts(workload) if ahead else workload
    begin_s, begin_processor_s = time.perf_counter(), time.process_time()
    say("searching placements")
    space = Space.of(CallModel(Cost(calibration, workload, cluster), allowed, evaluated_tokens, ahead))
    calls = [*zip(space.model.calls, space.candidates, strict=True)]
    for call, candidates in calls:
        if not candidates:
            raise UserError(f"no layout of {call.name} is allowed; allow more, or use another number of devices")
    work = Budget(ROOMY_SHARE * budget)
    roomy = roomiest(space, work)
    work.steps = budget
    best, gap = choose(space, method, Best(keep), work)
    if roomy and space.model.excess_bytes(roomy) <= 0 and not best.found:
        best.offer(space.model.score_s(roomy), roomy)
        refine(space, roomy, best)
    # among more candidates the local search ends in worse places; states in host memory are for want of memory alone
    on_device = [[one for one in of if not (one.layout.offload and call.kind == "train")] for call, of in calls]
    in_chain, chained = Space(space.model.in_chain(), (*map(tuple, on_device),)), Best(NUM_CHAINED)
    if space.model.can_chain:
        two_phase_in_chain(in_chain, chained, best.choices)
    search_s, processor_s = time.perf_counter() - begin_s, time.process_time() - begin_processor_s
    if not best.found:
        raise UserError(why_none(space, roomy, num_steps=work.taken, proved=gap == 0.0))
    plans = simulated(space, best, method, calibration, say) + simulated(in_chain, chained, method, calibration, say)
    plans = tuple(sorted(plans, key=lambda plan: plan.forecast.makespan_s)[:keep])
    simulate_s = time.perf_counter() - begin_s - search_s
    num_scored = best.num_scored + chained.num_scored
    return SearchResult(plans, gap, num_scored, search_s, processor_s, simulate_s)


def choose(space: Space, method: str, best: Best, budget: Budget) -> tuple[Best, float | None]:
    """Returns the best choices of a method, and the optimality gap.

    budget: of the exact method and of the Markov chain.
    """
    if method == "two_phase":
        two_phase(space, best)
        return best, None
    if method == "mcmc":
        markov_chain(space, best, budget)
        if best.found:
            refine(space, best.choices[0][1], best)
        return best, None
    least_s = exact(space, best, budget)
    is_proved = least_s >= best.seconds
    for prior in dict.fromkeys(priors(space)):  # alternatives
        filled(space, prior, best)
    if best.found and not is_proved:  # the budget was spent too early: no worse than the local search
        two_phase(space, best)
    if not best.found:
        return best, 0.0 if is_proved else 1.0
    return best, max(0.0, 1 - least_s / best.seconds)


def simulated(
    space: Space, best: Best, method: str, calibration: Calibration, say: Callable[[str], object] = str
) -> tuple[Plan, ...]:
    """Compiles and simulates the best choices of a method; the quickest program comes first.

    say: see `search`.
    """
    plans = []
    for number, choice in enumerate(best.choices, 1):
        say(f"simulating plan {number} of {len(best.choices)}")
        plans.append(_simulated(space.model, calibration, method, *choice))
    plans.sort(key=lambda plan: plan.forecast.makespan_s)
    workload = space.model.workload
    streaming = [plan for plan in plans if plan.placement.streams(workload)][:NUM_STREAMING]
    say(f"simulating variants of {len(streaming)} plans")
    plans = [_tuned(plan, calibration) if plan in streaming else plan for plan in plans]
    return tuple(sorted(plans, key=lambda plan: plan.forecast.makespan_s))


def _simulated(model: CallModel, calibration: Calibration, method: str, call_level_s: float, chosen: Choice) -> Plan:
    """Returns the quickest program of a choice: with or without streaming and, in two_phase, with the exchanges of the
    interleaving strategies. In a chain all mini-batches are decoded at once, as CallModel.chained_s assumes."""
    placed = replace(model.placement(chosen), chain=model.chain, ahead=model.ahead)
    decoded = model.workload.num_mini_batches if model.chain else placed.decode_mini_batches
    name = name_of(placed, model.workload, model.cluster)
    frozen = tuple(call.name for i, call in enumerate(model.calls) if model.trained_by(i) is None)
    variants = [placed]
    if model.may_stream(chosen):
        variants.append(replace(placed, stream=True, decode_mini_batches=decoded))
    if method == "two_phase" and name == "interleaving":
        variants += [replace(placed, own_first=frozen), replace(placed, joint=(frozen,))]
    plans = []
    for placement in variants:
        program = compile_program(model.workload, placement, model.cluster)
        plans.append(Plan(name, placement, program, forecast(program, calibration), call_level_s))
    return min(plans, key=lambda plan: plan.forecast.makespan_s)


def _tuned(plan: Plan, calibration: Calibration) -> Plan:
    """Returns a plan that streams, with the fields of its stream that make its program the quickest, chosen one after
    another."""
    num = plan.program.workload.num_mini_batches
    for field, values in STREAMS.items():
        others = {min(value, num) for value in (*values, num)} - {getattr(plan.placement, field)}
        for value in sorted(others):
            change: dict[str, Any] = {field: value}
            placement = replace(plan.placement, **change)
            program = compile_program(plan.program.workload, placement, plan.program.cluster)
            found = forecast(program, calibration)
            if found.makespan_s < plan.forecast.makespan_s:
                plan = replace(plan, placement=placement, program=program, forecast=found)
    return plan


def name_of(placement: Placement, workload: Workload, cluster: Cluster) -> str:
    """Returns the strategy that a placement resembles.

    separation: train calls share no rank with the other calls, if there are any; perhaps one iteration ahead.
    flattening: all calls are on all ranks in one grid.
    reallocation: all calls are on all ranks, in several grids.
    interleaving: trained models are on all ranks, and the frozen models divide the ranks.
    mixed: anything else.
    """
    calls = [call for call in workload.workflow.placed_calls if workload.models[call.model] is not None]
    layouts = {call.name: placement.layouts[call.name] for call in calls}
    late = {call.name for call in calls if isinstance(call, Train) or (placement.ahead and is_current(call))}
    training = [set(layouts[name].ranks) for name in late]
    others = [set(layout.ranks) for name, layout in layouts.items() if name not in late]
    if training and others and all(a.isdisjoint(b) for a in training for b in others):
        return SEPARATION_AHEAD if placement.ahead else "separation"
    everyone = set(cluster.ranks)
    if all(set(layout.ranks) == everyone for layout in layouts.values()):
        grids = {(layout.pp, layout.tp) for layout in layouts.values()}
        return "flattening" if len(grids) == 1 else "reallocation"
    frozen = [call.name for call in calls if workload.workflow.train_call(call.model) is None]
    apart = [set(layouts[name].ranks) for name in frozen]
    rest = all(set(layout.ranks) == everyone for name, layout in layouts.items() if name not in frozen)
    if rest and sum(map(len, apart)) == len(set().union(*apart)):
        return "interleaving"
    return "mixed"


# ---- two phases ------------------------------------------------------------------------------------------------------


def two_phase(space: Space, best: Best) -> None:
    """Finds the best choice on the meshes of each prior; then searches locally around the best few of them."""
    choices = [one for prior in dict.fromkeys(priors(space)) if (one := filled(space, prior, best))]
    for chosen in sorted(choices, key=space.model.score_s)[:NUM_PRIORS]:
        refine(space, chosen, best)


def two_phase_in_chain(space: Space, best: Best, others: Iterable[tuple[float, Choice]]) -> None:
    """Finds choices for iterations that are a chain, as two_phase does: around priors, of which those that are as good,
    such as mirrored ones, count once; and among the best choices for other iterations."""
    found = (filled(space, prior, best) for prior in priors_in_chain(space))
    choices = {round(space.model.score_s(one), 9): one for one in found if one}
    for seconds in sorted(choices)[:NUM_CHAINED]:
        refine(space, choices[seconds], best)
    for _, chosen in others:
        best.offer(space.model.score_s(chosen), chosen)


def refine(space: Space, chosen: Choice, best: Best) -> None:
    """Improves a choice until no neighbour is better. Neighbours move one call to a mesh of some call or to a half of
    one, move another call of a trained model there with its training in one grid, change the layouts of two calls on
    their meshes or, where none of these is better, make room for a quicker layout of a call."""
    before = None
    while before != chosen:
        before = chosen
        near = [around(space, chosen, of) for of in space.candidates]
        chosen = coordinate_descent(space, chosen, near, best)
        for train, users in space.model.models:
            if train is None:
                continue
            for user in users:
                pairs = _alike(near[user], near[train])
                chosen = improve(space, chosen, (user, train), pairs, best)
        grid = on_meshes(space, tuple((one.first, one.stop) for one in chosen))
        for i, j in combinations(range(len(grid)), 2):
            chosen = improve(space, chosen, (i, j), product(grid[i], grid[j]), best)
        if chosen == before:
            chosen = with_room(space, chosen, best)


def _alike(users: Sequence[Candidate], trainings: Sequence[Candidate]) -> Iterator[tuple[Candidate, Candidate]]:
    """Returns pairs of candidates with which a call uses the weights that its model trains."""
    at: dict[Destination, list[Candidate]] = {}
    for one in users:
        at.setdefault(one.where, []).append(one)
    return ((one, training) for training in trainings for one in at.get(training.where, ()))


def filled(space: Space, meshes: Meshes, best: Best) -> Choice | None:
    """Returns the best choice on given meshes that coordinate descent reaches from the choice that needs the least
    memory; None if that one does not fit."""
    grid = on_meshes(space, meshes)
    if not all(grid):
        return None
    chosen, missing = least_full(space.model, tuple(min(of, key=least_memory) for of in grid), grid, Budget())
    if missing > 0:
        return None
    best.num_scored += 1
    best.offer(space.model.score_s(chosen), chosen)
    return coordinate_descent(space, chosen, grid, best)


def with_room(space: Space, chosen: Choice, best: Best) -> Choice:
    """Improves a choice by quicker candidates of one call that fit only if all other calls, on their meshes, need less
    memory. For each such candidate, the other calls first change to layouts that need less, then to quicker ones for
    which the memory suffices."""
    model, grid = space.model, on_meshes(space, tuple((one.first, one.stop) for one in chosen))
    for index, of in enumerate(grid):
        rank = _rank(model, chosen)
        changed = [(*chosen[:index], one, *chosen[index + 1 :]) for one in of]
        ranks = [_rank(model, one) for one in changed]
        quicker = sorted((number for number in range(len(of)) if ranks[number] < rank), key=ranks.__getitem__)
        best.num_scored += len(of)
        for number in quicker[:NUM_TIGHT]:
            others = [[of[number]] if place == index else those for place, those in enumerate(grid)]
            work = Budget()
            roomy, missing = least_full(model, changed[number], others, work)
            best.num_scored += work.taken
            if missing > 0:
                continue
            roomy = coordinate_descent(space, roomy, grid, best)
            if _rank(model, roomy) < rank:
                chosen = roomy
                best.offer(model.score_s(chosen), chosen)
                break
    return chosen


def coordinate_descent(space: Space, chosen: Choice, grid: Sequence[Sequence[Candidate]], best: Best) -> Choice:
    """Improves a choice, one call after another, until no other candidate of the grid for any call is better."""
    improved = True
    while improved:
        improved = False
        for index, of in enumerate(grid):
            before, chosen = chosen, improve(space, chosen, (index,), zip(of), best)
            improved |= before != chosen
    return chosen


def improve(
    space: Space, chosen: Choice, calls: Sequence[int], others: Iterable[Sequence[Candidate]], best: Best
) -> Choice:
    """Improves a choice by other candidates for some calls together; one may free memory that another needs."""
    model, current = space.model, list(chosen)
    rank = _rank(model, current)
    kept = [current[index] for index in calls]
    for picked in others:
        for index, one in zip(calls, picked, strict=True):
            current[index] = one
        other = _rank(model, current, rank[0])
        best.num_scored += 1
        if other < rank and model.excess_bytes(current) <= 0:
            rank, kept = other, list(picked)
            best.offer(model.score_s(current), current)
    for index, one in zip(calls, kept, strict=True):
        current[index] = one
    return tuple(current)


def _rank(model: CallModel, chosen: Sequence[Candidate], most_s: float = inf) -> tuple[float, float]:
    """Sorts choices: by seconds of an iteration, and equal ones by the sum over calls. most_s: of score_s."""
    return round(model.score_s(chosen, most_s), 9), sum([one.seconds for one in chosen])
