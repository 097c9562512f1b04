"""Where no placement fits: the least memory that was found, and the options that take memory.

The least memory is that of the fullest rank, by the model of memory of the search (iteration_model.py). It is found by
a local search that only looks at bytes, from the meshes with which two_phase begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

from rlhf_spmd.plan.search.budget import Budget
from rlhf_spmd.plan.search.candidates import Candidate, Destination
from rlhf_spmd.plan.search.exact import Choice, Space
from rlhf_spmd.plan.search.iteration_model import CallModel
from rlhf_spmd.plan.search.priors import around, grid_on, least_full, least_memory, least_static, priors

PARTS = ("resident", "gathered", "reduced", "activations", "KV cache")  # as in iteration_model.Parts


@dataclass(frozen=True, slots=True)
class Roomy:
    """A choice that needs little memory. excess_bytes: what its fullest rank lacks; at most 0 if it fits."""

    chosen: Choice
    excess_bytes: float

    @property
    def fits(self) -> bool:
        return self.excess_bytes <= 0


def roomiest(space: Space, budget: Budget) -> Roomy | None:
    """Returns the first choice found that fits, else the one with the least memory; None if no meshes suit all
    calls."""
    model, best = space.model, None
    grids = [grid for prior in dict.fromkeys(priors(space)) if all(grid := grid_on(space, prior))]
    for key, grid in product((least_memory, least_static), grids):  # a frozen model alone gains little if offloaded
        if best is not None and budget.is_spent:
            break
        chosen, _ = least_full(model, tuple(min(of, key=key) for of in grid), grid, budget)
        here = Roomy(chosen, model.excess_bytes(chosen))
        if here.fits:
            return here
        best = here if best is None or here.excess_bytes < best.excess_bytes else best
    return best and _descend(space, best, budget)


def _descend(space: Space, start: Roomy, budget: Budget) -> Roomy:
    """Changes one call, or all calls of a trained model together, until nothing lowers the memory."""
    model, chosen, before = space.model, start.chosen, None
    while chosen != before and not budget.is_spent:
        before = chosen
        near = [around(space, chosen, of) for of in space.candidates]
        chosen, _ = least_full(model, chosen, near, budget)
        chosen = _together(model, chosen, near, budget)
    excess = model.excess_bytes(chosen)
    return Roomy(chosen, excess) if excess <= start.excess_bytes else start


def _together(model: CallModel, chosen: Choice, near: Sequence[Sequence[Candidate]], budget: Budget) -> Choice:
    """Splits the calls of each trained model alike, so that they share its weights, if that helps."""
    kept, missing = list(chosen), model.overflow_bytes(chosen)
    for train, users in model.models:
        if train is None:
            continue
        small: list[dict[Destination, Candidate]]  # of each user: the smallest candidate of each split
        small = [{} for _ in users]
        for smallest, user in zip(small, users, strict=True):
            for one in sorted(near[user], key=least_memory):
                smallest.setdefault(one.where, one)
        for training in near[train]:
            if budget.is_spent:
                break
            budget.taken += 1
            current = list(kept)
            current[train] = training
            for smallest, user in zip(small, users, strict=True):
                current[user] = smallest.get(training.where, current[user])
            if (other := model.overflow_bytes(current)) < missing:
                kept, missing = current, other
    return tuple(kept)


def why_none(space: Space, best: Roomy | None, *, num_steps: int, proved: bool) -> str:
    """Says in words why there is no plan.

    best: the least memory that was found.
    proved: all placements were considered.
    num_steps: that the search took.
    """
    model, cluster = space.model, space.model.cluster
    text = f"no placement of this workload fits {cluster}: all were considered"
    if not proved:
        text = f"no placement of this workload that fits {cluster} was found (in {num_steps:,} steps)"
    if best is None or best.excess_bytes == inf:
        return f"{text}. Its devices cannot be divided among the calls; use more devices"
    parts = [model.parts_at(best.chosen, place) for place in range(len(model.limits))]
    place = max(range(len(parts)), key=lambda at: parts[at].peak - model.limits[at])
    rank = next(one.ranks[place - one.first] for one in best.chosen if one.first <= place < one.stop)
    whole, usable = cluster.device_bytes(rank) or 0, cluster.usable_bytes(rank) or 0
    sizes = ", ".join(f"{name} {_gib(size)}" for name, size in zip(PARTS, parts[place], strict=True) if size)
    layouts = ", ".join(f"{call.name} {one.layout}" for call, one in zip(model.calls, best.chosen, strict=True))
    text += (
        f". The least memory that was found is {_gib(parts[place].peak)} on rank {rank} ({sizes}), "
        f"{_gib(best.excess_bytes)} more than the {_gib(usable)} of {_gib(whole)} that it may use, with {layouts}. "
    )
    options = ", ".join(_lower(model))
    return f"{text}Lower {options}; or use more devices, devices with more memory, or smaller models"


def _lower(model: CallModel) -> list[str]:
    """Returns the options that take memory, those that do not change what is trained first."""
    workload, options = model.workload, []
    if calls := workload.workflow.generate_calls:
        turns = any(call.has_turns for call in calls)
        length = "episode.max_row_tokens" if turns else "generation.max_new_tokens"
        options = [f"generation.max_sequences={workload.max_sequences}", f"{length}={workload.max_response}"]
    if model.evaluated_tokens > workload.max_response:
        options.append(f"eval.max_new_tokens={model.evaluated_tokens}")
    options.append(f"data.max_prompt={workload.max_prompt}")
    return [*options, "dtype to bfloat16"] if workload.param_bytes > 2 else options


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
