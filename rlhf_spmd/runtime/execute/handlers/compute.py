"""Pure computations on data between the calls of models: the functions that an algorithm names."""

# M mini-batches, C columns, B rows, N groups, S samples of a prompt

import torch
from torch import Tensor

from rlhf_spmd.pages.functions import mask_words
from rlhf_spmd.plan.calls import Compute
from rlhf_spmd.plan.program.instructions import Run
from rlhf_spmd.plan.runtime_words import SUMS
from rlhf_spmd.runtime.execute.iteration import Iteration, kept_of
from rlhf_spmd.runtime.execute.job import Job, shape_of
from rlhf_spmd.runtime.execute.page_functions import called, results_of


def compute(job: Job, call: Compute, run: Run, data: Iteration) -> None:
    """Runs the function of a call on this rank's columns, with all rows that its scope asks for. If it ends with sums
    over the batch, collective over the Run's group. Rows that are dropped keep results of 0; functions of rows and of
    groups do not see them. Functions of groups see the rows of an episode as one row, which they are joined to."""
    workflow = job.workload.workflow
    place, seen = job.place(run), job.place(run, seen=True)
    own = slice(place[1].start - seen[1].start, place[1].stop - seen[1].start)
    shape, joined = shape_of(seen), job.workload.episode_rows if call.scope == "group" else 1
    num_rows, num_samples = shape[0] * shape[1] // joined, job.workload.samples_per_prompt // joined
    # the leading dims of arguments: rows or the whole batch [B], groups [N, S], mini-batches [M, C]
    leading = {"group": (num_rows // num_samples, num_samples), "mini_batch": shape}.get(call.scope, (num_rows,))
    is_own = torch.zeros(shape, dtype=torch.bool, device=job.world.device)
    is_own[:, own] = True
    is_own = is_own.flatten()[::joined].unflatten(0, leading)
    rows = {key: joined_rows(data.store.at(key, seen).flatten(0, 1), joined) for key in call.inputs}
    words = job.masks(mask_words(workflow, call), rows)
    arguments = {name: rows[key] for name, key in call.arguments} | words
    given = {name: tensor.unflatten(0, leading) for name, tensor in arguments.items()}
    kept_B = kept_of(job.workload, rows, call.inputs if call.scope in ("row", "group") else ())
    if kept_B.dim():
        kept = kept_B.view(leading[0], -1).any(1)  # groups are dropped as a whole
        given, is_own = {name: tensor[kept] for name, tensor in given.items()}, is_own[kept]
        leading = (int(kept.sum()), *leading[1:])
    shapes = {key: (*leading, *(joined * num for num in job.workload.row_shape(key))) for key in call.outputs}
    results, log = results_of(job, call, given, shapes)
    layout = job.program.layout_of(run)
    # of ranks that all see the same rows, one counts
    counts = layout.reports(job.world.rank)
    counts &= call.scope not in ("mini_batch", "batch") or layout.dp_index(job.world.rank) == 0
    if call.sums:
        counted = given | results
        if call.scope == "group":  # counted by the rank that owns its first sample
            counted = {name: value[is_own[:, 0]] for name, value in counted.items()}
        sums = called(job, call, counted, "sums")
        sums = job.reduced(sums if counts else torch.zeros_like(sums), run)
        results, _ = results_of(job, call, given | results | {SUMS: sums}, shapes, "finish")
    for key in call.outputs:
        whole = results[key].flatten(0, len(leading) - 1)
        if kept_B.dim():
            whole = whole.new_zeros(num_rows, *whole.shape[1:]).index_put((kept_B,), whole)
        is_number = whole.dim() == 1
        whole = whole.repeat_interleave(joined) if is_number else whole.unflatten(1, (joined, -1)).flatten(0, 1)
        data.store.at(key, place)[:] = whole.unflatten(0, shape)[:, own]
    if counts and run.consumer == job.program.placement.sites(call, workflow)[0]:
        for name, (total, weight) in log.items():
            data.meter.log(name, *_own_part(total, weight, is_own), job.config.algorithm.over(name))


def joined_rows(rows: Tensor, num: int) -> Tensor:
    """Joins every num neighbouring rows: their tokens [B, G] follow one another; of numbers [B], which they share, the
    first one remains."""
    return rows[::num] if rows.dim() == 1 else rows.unflatten(0, (-1, num)).flatten(1, 2)


def _own_part(total: Tensor | float, weight: Tensor | float, is_own: Tensor) -> tuple[Tensor | float, Tensor | float]:
    """Returns a sum for the log and its weight. With the scope of a group, they may be tensors of groups [N] or samples
    [N, S], because several ranks may see one group: each counts its own samples, and the groups that begin with one."""
    if not isinstance(total, Tensor) or not total.dim():
        return total, weight
    weight = torch.ones_like(total, dtype=torch.float64) if not isinstance(weight, Tensor) else weight
    mine = is_own if total.shape == is_own.shape else is_own[:, 0]
    return total[mine].double().sum(), weight[mine].double().sum()
