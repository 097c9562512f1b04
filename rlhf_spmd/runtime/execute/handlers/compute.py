"""Pure computations on data between the calls of models: the functions that an algorithm's page names."""

# M mini-batches, C columns, B rows, N groups, S samples of a prompt

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.algorithm import bound, mask_words
from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.program.instructions import Run
from rlhf_spmd.plan.workflow import Call
from rlhf_spmd.runtime.execute.handlers.context import CallContext, RunState, shape_of
from rlhf_spmd.runtime.execute.iteration import Iteration


def compute(context: CallContext, call: Call, step: Run, data: Iteration, state: RunState) -> None:
    """Runs the function of a call on this rank's columns, with all rows that its scope asks for."""
    algorithm, workflow = context.config.algorithm, context.workload.workflow
    place, seen = context.place(step), context.place_seen(step)
    leading = _leading(context, call, shape_of(seen))
    rows = {key: context.held(data, key, seen).flatten(0, 1) for key in call.inputs}
    words = context.masks(mask_words(workflow, call), rows)
    given = {name: rows[key] for name, key in call.arguments} | words
    given = {name: tensor.unflatten(0, leading) for name, tensor in given.items()}
    numbers = algorithm.numbers(context.config.options, state.of_algorithm)
    function = algorithm.function(call.function)
    made = function(**bound(function, numbers | given))
    made = made if isinstance(made, tuple) else (made,)
    log = made[-1] if isinstance(made[-1], Mapping) else {}
    num_made = len(made) - isinstance(made[-1], Mapping)
    if num_made != len(call.outputs):
        raise UserError(
            f"{call.function}() returned {num_made} results, but the workflow of {algorithm.name} makes "
            f"{', '.join(call.outputs)} of them; return as many, and sums for the log after them"
        )
    results = dict(zip(call.outputs, made, strict=False))
    layout = context.program.layout_of(step)
    reports = layout.reports(context.world.rank)
    if call.sums:
        results = _finished(context, call, step, numbers | given, results, reports)
    own = slice(place[1].start - seen[1].start, place[1].stop - seen[1].start)
    for key in call.outputs:
        whole = results[key].flatten(0, len(leading) - 1).unflatten(0, shape_of(seen))
        data.store.at(key, place)[:] = whole[:, own]
    first_site = context.program.placement.sites(call, workflow)[0]
    # of ranks that all see the same rows, one counts
    counts = call.scope not in ("mini_batch", "batch") or layout.dp_index(context.world.rank) == 0
    if reports and counts and step.consumer == first_site:
        for name, (total, weight) in log.items():
            data.meter.add(name, *_own_part(total, weight, leading, shape_of(seen), own))


def _leading(context: CallContext, call: Call, shape: tuple[int, int]) -> tuple[int, ...]:
    """The leading dims of a function's arguments: rows or the whole batch [B], groups [N, S], mini-batches [M, C]."""
    num_rows = shape[0] * shape[1]
    if call.scope == "group":
        samples = context.workload.samples_per_prompt
        return num_rows // samples, samples
    return shape if call.scope == "mini_batch" else (num_rows,)


def _finished(
    context: CallContext, call: Call, step: Run, given: dict, results: dict[str, Tensor], reports: bool
) -> dict[str, Tensor]:
    """The results of a compute that ends with sums over the batch. Collective over the Run's group."""
    algorithm = context.config.algorithm
    count, finish = (algorithm.companion(call.function, suffix) for suffix in ("_sums", "_finish"))
    sums = count(**bound(count, given | results))
    sums = sums if reports else torch.zeros_like(sums)
    if (group := context.group(step)) is not None:
        dist.all_reduce(sums, group=group)
    made = finish(**bound(finish, given | results | {"sums": sums}))
    return dict(zip(call.outputs, made if isinstance(made, tuple) else (made,), strict=True))


def _own_part(
    total: Tensor, weight: Tensor | float, leading: tuple[int, ...], shape: tuple[int, int], own: slice
) -> tuple[float, float]:
    """A sum for the log and its weight. With the scope of a group, they may be tensors of groups [N] or samples [N, S],
    because several ranks may see one group: each counts its own samples, and the groups that begin with one."""
    if not isinstance(total, Tensor) or not total.dim():
        return total, weight
    weight = torch.ones_like(total, dtype=torch.float64) if not isinstance(weight, Tensor) else weight
    mine = torch.zeros(shape, dtype=torch.bool, device=total.device)
    mine[:, own] = True
    mine = mine.flatten().unflatten(0, leading)
    mine = mine if total.shape == mine.shape else mine[:, 0]
    return total[mine].double().sum(), weight[mine].double().sum()
