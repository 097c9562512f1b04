"""Rounds of sampling on a rank (plan/program/rounds.py): agrees which groups failed, and gives them further prompts.

A group is a number of neighbouring rows in the order of the batch [M, C], in which they train. The j-th group that
failed takes the j-th next prompt of the data set, whose order goes on where it is after the first round.
"""

# M mini-batches, C columns, N groups, S samples of a prompt, K rows that are drawn again

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlhf_spmd.plan.program.rounds import agreeing, deciding
from rlhf_spmd.runtime.execute.iteration import ALL, Iteration, Place, Store, given_rows, occurrences
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.execute.partial_rollouts import agree_on_carried
from rlhf_spmd.runtime.execute.response_hashes import reported_columns
from rlhf_spmd.runtime.world.reports import Reports

SAMPLES_OF_ROUND = 2**24  # a sample's number is its place in the round, after those of the rounds before


def agree_on_round(job: Job, data: Iteration, ranks: Sequence[int], reports: Reports | None) -> bool:
    """Gives the groups that failed in a round other prompts. Returns whether there are none. Collective over ranks."""
    assert data.rounds is not None, "rows are sampled in rounds"
    groups, number = _failed_here(job, data), len(data.rounds.failed) + 1
    if reports is None:
        every = job.world.allgather(groups, f"{data.title}: round {number + 1}")
        failed = sorted(set().union(*every))
    else:
        failed = reports.merge(ranks, groups, lambda every: sorted(set().union(*every)))
    before = len(data.rounds.failed[-1]) if data.rounds.failed else job.workload.rollout_batch
    if job.world.rank == ranks[0]:
        data.meter.add("failed_groups", len(failed), before)
    if failed:
        draw_again(job, data, failed)
    return not failed


def _failed_here(job: Job, data: Iteration) -> list[int]:
    """Returns the groups that failed by the rows that this rank reports."""
    workflow = job.workload.workflow
    call = deciding(workflow)
    assert call is not None, "a compute has rounds"
    (site,) = job.program.placement.sites(call, workflow)
    columns = reported_columns(job.program, workflow.placed_call(site), job.world.rank)
    if columns.start == columns.stop:
        return []
    failed_MC = data.store.at(call.outputs[0], (ALL, columns)).cpu().numpy() != 0
    mini_batches, places = np.nonzero(failed_MC)
    rows = mini_batches * job.workload.mini_batch + columns.start + places
    return sorted(set((rows // job.workload.samples_per_prompt).tolist()))


def draw_again(job: Job, data: Iteration, failed: Sequence[int]) -> None:
    """Gives groups, in their order, the next prompts; their rows are those of the next round."""
    rounds, size = data.rounds, job.workload.samples_per_prompt
    assert rounds is not None
    prompt_K = np.array(job.prompts.following(rounds.cursor, len(failed))).repeat(size)
    rounds.cursor += len(failed)
    rounds.failed.append(list(failed))
    rounds.again_MC = np.zeros(data.prompt_MC.shape, bool)
    rounds.again_MC.reshape(-1, size)[failed] = True
    data.prompt_MC[rounds.again_MC] = prompt_K
    data.sample_MC[rounds.again_MC] = occurrences(prompt_K) + len(rounds.failed) * SAMPLES_OF_ROUND
    data.store |= given_rows(job.workload, job.prompts, job.columns, data.prompt_MC, job.world.device)
    for noted_MC in data.noted.values():
        noted_MC[rounds.again_MC] = np.nan


def only_again(job: Job, data: Iteration, columns: slice, prompts: str) -> tuple[Iteration, Place]:
    """Returns the rows in some columns that a round samples as their own iteration, [1, K], and their place in it.

    prompts: the key of the prompts.
    """
    assert data.rounds is not None, "rows are sampled in rounds"
    again_MC = data.again((ALL, columns), len(data.rounds.failed))
    rows = again_MC.cpu().numpy()
    prompt_1K, sample_1K = data.prompt_MC[:, columns][rows][None], data.sample_MC[:, columns][rows][None]
    all_rows = range(prompt_1K.shape[1])
    store = Store(job.workload, {prompts: (all_rows,)}, data.store.device)
    store[prompts] = data.store.at(prompts, (ALL, columns))[again_MC][None]
    drawn = replace(data, prompt_MC=prompt_1K, sample_MC=sample_1K, store=store)
    return drawn, (slice(0, 1), slice(0, len(all_rows)))


def settle(job: Job, data: Iteration | None) -> None:
    """Counts the prompts of a sampled batch, and informs the ranks that do not know them of the responses that go on
    or, one iteration ahead, of its rounds. Collective."""
    if data is None or data.rounds is None:
        return
    if data.carried is not None:
        agree_on_carried(job, data)
    elif job.program.placement.ahead:
        root, *_ = agreeing(job.workload, job.program.placement, job.program.cluster)
        every = job.world.bcast(data.rounds.failed, root, f"{data.title}: the prompts that it used")
        for failed in every[len(data.rounds.failed) :]:
            draw_again(job, data, failed)
    job.state.prompts_used = data.rounds.cursor
