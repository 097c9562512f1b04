"""Pure computations on data between the calls of models: the functions that an algorithm's page names."""

# M mini-batches, C columns, B rows, N groups, S samples of a prompt

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.pages.algorithm import mask_words
from rlhf_spmd.plan.program.instructions import Run
from rlhf_spmd.plan.workflow import Compute
from rlhf_spmd.runtime.execute.iteration import Iteration
from rlhf_spmd.runtime.execute.job import Job, shape_of
from rlhf_spmd.runtime.execute.page_functions import called, results_of


def compute(job: Job, call: Compute, run: Run, data: Iteration) -> None:
    """Runs the function of a call on this rank's columns, with all rows that its scope asks for."""
    algorithm, workflow = job.config.algorithm, job.workload.workflow
    place, seen = job.place(run), job.place_seen(run)
    leading = _leading(job, call, shape_of(seen))
    rows = {key: job.held(data, key, seen).flatten(0, 1) for key in call.inputs}
    words = job.masks(mask_words(workflow, call), rows)
    arguments = {name: rows[key] for name, key in call.arguments} | words
    given = job.numbers | {name: tensor.unflatten(0, leading) for name, tensor in arguments.items()}
    made = called(algorithm, call.function, job.functions[call.name].function, given)
    shapes = {key: (*leading, *job.workload.row_shape(key)) for key in call.outputs}
    results, log = results_of(algorithm, call.function, made, shapes)
    layout = job.program.layout_of(run)
    own = slice(place[1].start - seen[1].start, place[1].stop - seen[1].start)
    reports = layout.reports(job.world.rank)
    # of ranks that all see the same rows, one counts
    counts = reports and (call.scope not in ("mini_batch", "batch") or layout.dp_index(job.world.rank) == 0)
    if call.sums:
        groups = _own_samples(shape_of(seen), leading, own)[:, 0] if call.scope == "group" else None
        results = _finished(job, call, run, given, results, counts=counts, groups=groups)
    for key in call.outputs:
        whole = results[key].flatten(0, len(leading) - 1).unflatten(0, shape_of(seen))
        data.store.at(key, place)[:] = whole[:, own]
    first_site = job.program.placement.sites(call, workflow)[0]
    if counts and run.consumer == first_site:
        for name, (total, weight) in log.items():
            data.meter.log(name, *_own_part(total, weight, leading, shape_of(seen), own), algorithm.over(name))


def _leading(job: Job, call: Compute, shape: tuple[int, int]) -> tuple[int, ...]:
    """The leading dims of a function's arguments: rows or the whole batch [B], groups [N, S], mini-batches [M, C]."""
    num_rows = shape[0] * shape[1]
    if call.scope == "group":
        samples = job.workload.samples_per_prompt
        return num_rows // samples, samples
    return shape if call.scope == "mini_batch" else (num_rows,)


def _finished(
    job: Job,
    call: Compute,
    run: Run,
    given: dict[str, Any],
    results: dict[str, Tensor],
    *,
    counts: bool,
    groups: Tensor | None,
) -> dict[str, Tensor]:
    """The results of a compute that ends with sums over the batch. Collective over the Run's group. counts: whether
    this rank counts what it sees. groups: bool [N], which of the groups it counts; None: all rows."""
    algorithm, count, finish = job.config.algorithm, job.functions[call.name].sums, job.functions[call.name].finish
    assert count is not None and finish is not None, "check_functions"
    counted = given | results
    if groups is not None:
        counted = {name: x[groups] if isinstance(x, Tensor) else x for name, x in counted.items()}
    sums = called(algorithm, f"{call.function}_sums", count, counted)
    sums = sums if counts else torch.zeros_like(sums)
    if (group := job.group(run)) is not None:
        dist.all_reduce(sums, group=group)
    made = called(algorithm, f"{call.function}_finish", finish, given | results | {"sums": sums})
    shapes = {key: tuple(result.shape) for key, result in results.items()}
    return results_of(algorithm, f"{call.function}_finish", made, shapes)[0]


def _own_samples(shape: tuple[int, int], leading: tuple[int, ...], own: slice) -> Tensor:
    """Which of the rows that this rank sees are in its own columns: bool, with the leading dims of arguments. A group
    is counted by the rank that owns its first sample."""
    mine = torch.zeros(shape, dtype=torch.bool)
    mine[:, own] = True
    return mine.flatten().unflatten(0, leading)


def _own_part(
    total: Tensor | float, weight: Tensor | float, leading: tuple[int, ...], shape: tuple[int, int], own: slice
) -> tuple[Tensor | float, Tensor | float]:
    """A sum for the log and its weight. With the scope of a group, they may be tensors of groups [N] or samples [N, S],
    because several ranks may see one group: each counts its own samples, and the groups that begin with one."""
    if not isinstance(total, Tensor) or not total.dim():
        return total, weight
    weight = torch.ones_like(total, dtype=torch.float64) if not isinstance(weight, Tensor) else weight
    mine = _own_samples(shape, leading, own).to(total.device)
    mine = mine if total.shape == mine.shape else mine[:, 0]
    return total[mine].double().sum(), weight[mine].double().sum()
