"""Where no placement fits: the least memory that was found, and the options with which something would fit.

The least memory is that of the fullest rank, by the model of memory of the search (iteration_model.py). It is found by
a local search that only looks at bytes, from the meshes with which two_phase begins. Options are tried one at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import Any

from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.search.budget import CANDIDATE, Budget
from rlhf_spmd.plan.search.candidates import Candidate, Destination
from rlhf_spmd.plan.search.exact import Choice, Space
from rlhf_spmd.plan.search.iteration_model import CallModel
from rlhf_spmd.plan.search.meshes import meshes
from rlhf_spmd.plan.search.priors import around, grid_on, least_full, least_memory, least_static, priors
from rlhf_spmd.plan.workload import Workload

PARTS = ("resident", "gathered", "reduced", "activations", "KV cache")  # of CallModel.parts_at
MOST_DEVICES = 1024  # of a larger cluster that is tried
LEAST_SEQUENCES, LEAST_TOKENS = 8, 32  # of smaller options that are tried


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
    chosen = _trimmed(space, chosen)
    excess = model.excess_bytes(chosen)
    return Roomy(chosen, excess) if excess <= start.excess_bytes else start


def _trimmed(space: Space, chosen: Choice) -> Choice:
    """Lowers the memory of calls that are not the fullest: where others need less, they would count."""
    current, missing = list(chosen), space.model.overflow_bytes(chosen)
    for index, of in enumerate(space.candidates):
        kept = current[index]
        for one in sorted((one for one in of if one.where == kept.where), key=least_memory):
            current[index] = one
            if space.model.overflow_bytes(current) <= missing:
                break
        else:
            current[index] = kept
    return tuple(current)


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


# ---- options that would help -----------------------------------------------------------------------------------------


def smaller(workload: Workload, evaluated_tokens: int) -> Iterator[list[tuple[str, Workload, int]]]:
    """Yields options that take less memory, by kind, the smallest change first: words, the workload, and the most
    tokens of a response in evaluations (0: none)."""
    turns = any(call.has_turns for call in workload.workflow.generate_calls)
    sizes = {
        "generation.max_sequences": ("max_sequences", LEAST_SEQUENCES),
        "episode.max_row_tokens" if turns else "generation.max_new_tokens": ("max_response", LEAST_TOKENS),
        "data.max_prompt": ("max_prompt", LEAST_TOKENS),
    }
    for option, (name, least) in sizes.items():
        changes: list[dict[str, Any]] = [{name: half} for half in halves(getattr(workload, name), least)]
        yield [(f"{option}={change[name]}", replace(workload, **change), evaluated_tokens) for change in changes]
    yield [(f"eval.max_new_tokens={half}", workload, half) for half in halves(evaluated_tokens, LEAST_TOKENS)]
    if workload.param_bytes > 2:
        yield [("dtype=bfloat16", replace(workload, param_bytes=2), evaluated_tokens)]


def halves(size: int, least: int) -> list[int]:
    """Returns a half, a quarter, ... of a size."""
    return [size >> power for power in range(1, size.bit_length()) if size >> power >= least]


def larger(cluster: Cluster) -> list[Cluster]:
    """Returns a cluster of more such nodes, if all nodes are alike."""
    doubled = [Cluster(cluster.nodes * times) for times in (2, 4, 8, 16)] if len(set(cluster.nodes)) == 1 else []
    return [one for one in doubled if one.num_devices <= MOST_DEVICES]


def helpful(space: Space, chosen: Choice, budget: Budget) -> list[str]:
    """Returns, for each kind of option, the smallest change with which something was found to fit, in words. Smaller
    options are tried with the placement at hand. If that is not enough, the first kind, which does not change what is
    trained, is tried with other placements as well."""
    model, found = space.model, []
    of_places = {(mesh.first, mesh.first + mesh.size): mesh for mesh in meshes(model.cluster)}
    kinds = [
        [(words, model.of(workload, model.cluster, tokens)) for words, workload, tokens in kind]
        for kind in smaller(model.workload, model.evaluated_tokens)
    ]
    for kind in kinds:
        for words, other in kind:
            same = [
                other.costs.candidate(call, of_places[one.first, one.stop], one.placed)
                for call, one in zip(other.calls, chosen, strict=True)
            ]
            if other.excess_bytes(same) <= 0:
                found.append(words)
                break
    for words, other in kinds[0] if not found else []:
        if _may_fit(other, budget):
            found.append(words)
            break
    for cluster in larger(model.cluster):
        if _may_fit(model.of(model.workload, cluster, model.evaluated_tokens), budget):
            found.append(f"--layout {cluster}")
            break
    return found


def _may_fit(model: CallModel, budget: Budget) -> bool:
    """Returns whether a choice is found that fits before the budget is spent."""
    if budget.is_spent:
        return False
    space = Space.of(model)
    budget.taken += CANDIDATE * sum(map(len, space.candidates))
    found = roomiest(space, budget)
    return found is not None and found.fits


def why_none(space: Space, best: Roomy | None, budget: Budget, *, proved: bool) -> str:
    """Says in words why there is no plan.

    best: the least memory that was found.
    proved: all placements were considered.
    budget: what is left may be spent on looking for options that help.
    """
    model, cluster = space.model, space.model.cluster
    text = f"no placement of this workload fits {cluster}: all were considered"
    if not proved:
        text = f"no placement of this workload that fits {cluster} was found (in {budget.taken:,} steps)"
    if best is None or best.excess_bytes == inf:
        return f"{text}. Its devices cannot be divided among the calls; use more devices"
    place = max(range(len(model.limits)), key=lambda at: model.bytes_at(best.chosen, at) - model.limits[at])
    rank = next(one.ranks[place - one.first] for one in best.chosen if one.first <= place < one.stop)
    whole, usable = cluster.device_bytes(rank) or 0, cluster.usable_bytes(rank) or 0
    parts = zip(PARTS, model.parts_at(best.chosen, place), strict=True)
    sizes = ", ".join(f"{name} {_gib(size)}" for name, size in parts if size)
    layouts = ", ".join(f"{call.name} {one.layout}" for call, one in zip(model.calls, best.chosen, strict=True))
    text += (
        f". The least memory that was found is {_gib(model.bytes_at(best.chosen, place))} on rank {rank} ({sizes}), "
        f"{_gib(best.excess_bytes)} more than the {_gib(usable)} of {_gib(whole)} that it may use, with {layouts}. "
    )
    words = helpful(space, best.chosen, budget)
    if words:
        return f"{text}It would fit with {', or with '.join(words)}"
    return f"{text}Use more devices, devices with more memory, or smaller models"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
