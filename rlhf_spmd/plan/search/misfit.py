"""Where no placement fits: the least memory that was found, and the options that take memory.

The least memory is that of the fullest rank, by the model of memory of the search (iteration_model.py). It is found by
a local search that only looks at bytes, from the meshes with which two_phase begins.
"""

from itertools import product
from math import inf

from rlhf_spmd.plan.search.budget import Budget
from rlhf_spmd.plan.search.exact import Choice, Space
from rlhf_spmd.plan.search.iteration_model import CallModel
from rlhf_spmd.plan.search.priors import around, least_full, least_memory, least_static, on_meshes, priors

PARTS = ("resident", "gathered", "gradients", "activations", "KV cache")  # as in iteration_model.Parts


def roomiest(space: Space, budget: Budget) -> Choice | None:
    """Returns the first choice found that fits, else one that needs little memory; None if no meshes suit all calls."""
    model, best, least = space.model, None, inf
    for key, meshes in product((least_memory, least_static), dict.fromkeys(priors(space))):
        grid = on_meshes(space, meshes)
        if all(grid) and not (best and budget.is_spent):
            chosen, _ = least_full(model, tuple(min(of, key=key) for of in grid), grid, budget)
            excess = model.excess_bytes(chosen)
            if best is None or excess < least:
                best, least = chosen, excess
            if least <= 0:
                return best
    before = None
    while best != before and best is not None and not budget.is_spent:
        before = best
        best, _ = least_full(model, best, [around(space, best, of) for of in space.candidates], budget)
    return best


def why_none(space: Space, best: Choice | None, *, num_steps: int, proved: bool) -> str:
    """Explains why no plan fits, and which options would help.

    best: the choice found with the least memory.
    proved: all placements were considered.
    num_steps: that the search took.
    """
    model, cluster = space.model, space.model.cluster
    text = f"no placement of this workload fits {cluster}: all were considered"
    if not proved:
        text = f"no placement of this workload that fits {cluster} was found (in {num_steps:,} steps)"
    if best is None or model.excess_bytes(best) == inf:
        return f"{text}. Its devices cannot be divided among the calls; use more devices"
    parts = [model.parts_at(best, place) for place in range(len(model.limits))]
    place = max(range(len(parts)), key=lambda at: parts[at].peak - model.limits[at])
    rank = next(one.ranks[place - one.first] for one in best if one.first <= place < one.stop)
    whole, usable = cluster.device_bytes(rank) or 0, cluster.usable_bytes(rank) or 0
    sizes = ", ".join(f"{name} {_gib(size)}" for name, size in zip(PARTS, parts[place], strict=True) if size)
    layouts = ", ".join(f"{call.name} {one.layout}" for call, one in zip(model.calls, best, strict=True))
    return (
        f"{text}. The least memory that was found is {_gib(parts[place].peak)} on rank {rank} ({sizes}), "
        f"{_gib(model.excess_bytes(best))} more than the {_gib(usable)} of {_gib(whole)} that it may use, with "
        f"{layouts}. Lower {', '.join(_lower(model))}; or use more devices, devices with more memory, or smaller models"
    )


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
