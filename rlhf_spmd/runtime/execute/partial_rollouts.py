"""Partial rollouts: a response takes several iterations, each of which samples `partial_steps` of its tokens.

A group in which some response has not ended *goes on*: the batch has no token of it, so that nothing scores or trains
it, and in the next batch it keeps its places, on the ranks that have its tokens and their logprobs. There its rows are
prefilled with the new weights, as after preemption, and draw further tokens with the random numbers of the iteration in
which they began. The other groups of the next batch, in the order of their rows, take the next prompts of the data set.

Token t of a row that began in iteration b was thus drawn in iteration b + t // partial_steps, by the weights of then.
"""

# M mini-batches, C columns, B sequences, G response tokens

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.plan.calls import Generate
from rlhf_spmd.plan.runtime_words import TOKEN_SHAPES
from rlhf_spmd.plan.workload import Workload
from rlhf_spmd.runtime.execute.iteration import Carried, Iteration, Place, Rounds, Store, occurrences
from rlhf_spmd.runtime.execute.job import Job, shape_of
from rlhf_spmd.runtime.generation.requests import Begun
from rlhf_spmd.runtime.world.metric_sums import Meter

HELD, TOKEN_LAG = "held_groups", "lag_tokens"  # in the log


def next_rows(
    job: Job, first_MC: np.ndarray, number: int, before: Iteration | None
) -> tuple[np.ndarray, np.ndarray, Rounds, Carried]:
    """Returns prompt and sample of each place of a batch, how many prompts have been used, and what it carries.

    first_MC: the numbers of its rows at their places.
    before: the batch before, which has been sampled; None: there is none.
    """
    workload, was = job.workload, before.carried if before else None
    goes_on_MC = was.goes_on_MC if was else np.zeros(first_MC.shape, bool)
    is_new_N = np.ones(first_MC.size, bool)
    is_new_N[first_MC[goes_on_MC]] = False
    size, used = workload.samples_per_prompt, job.state.prompts_used
    rounds = Rounds(used + int(is_new_N.sum()) // size)
    prompt_N, sample_N = np.zeros((2, first_MC.size), int)
    prompt_N[is_new_N] = np.repeat(job.prompts.following(used, rounds.cursor - used), size)
    sample_N[is_new_N] = occurrences(prompt_N[is_new_N])
    prompt_MC, sample_MC, began_MC = prompt_N[first_MC], sample_N[first_MC], np.full(first_MC.shape, number)
    if before and was:
        for new, old in ((prompt_MC, before.prompt_MC), (sample_MC, before.sample_MC), (began_MC, was.began_MC)):
            new[goes_on_MC] = old[goes_on_MC]
    assert number - began_MC.min() < workload.num_parts, "a response takes no more iterations than it has parts"
    rows = was.rows if was else _rows_of(job)
    return prompt_MC, sample_MC, rounds, Carried(began_MC, rows, np.zeros(first_MC.shape, bool))


def _rows_of(job: Job) -> Store:
    """Returns a store of what this rank generates."""
    (call,), rank = job.workload.workflow.generate_calls, job.world.rank
    layout = job.layout(call)
    columns = layout.columns(rank, job.workload.mini_batch) if rank in layout.ranks else range(0)
    return Store(job.workload, dict.fromkeys(call.outputs, (columns,)), job.world.device)


def begun(job: Job, call: Generate, data: Iteration, place: Place) -> Begun | None:
    """Returns what rows have when their generation begins; None where all of their responses end in one iteration."""
    if data.carried is None:
        return None
    responses, logprobs, *kept = (data.carried.rows.at(key, place).flatten(0, 1) for key in call.outputs)
    age_B = _ages(data, place)
    responses_BG = responses.masked_fill(age_B[:, None] == 0, -1)  # what stands there is of the row before
    is_over_B = ~_is_cut(job, responses_BG, age_B * job.workload.partial_steps)
    most_B = _limits(job.workload, age_B)
    return Begun(responses_BG, logprobs, kept[0] if kept else None, most_B.tolist(), is_over_B.tolist())


def carry(job: Job, call: Generate, data: Iteration, place: Place, made: dict[str, Tensor], meter: Meter) -> Tensor:
    """Keeps what rows have now, and blanks those in `made` that go on. Returns which rows do not: bool [B].

    made: results of the call by key, [B, ...].
    """
    carried, responses_BG = data.carried, made[call.outputs[0]]
    assert carried is not None
    age_B, size = _ages(data, place).to(responses_BG.device), job.workload.samples_per_prompt
    is_cut_B = _is_cut(job, responses_BG, _limits(job.workload, age_B))
    goes_on_N = is_cut_B.view(-1, size).any(1)
    goes_on_B = goes_on_N.repeat_interleave(size)
    carried.goes_on_MC[place] = goes_on_B.view(shape_of(place)).cpu().numpy()
    for key, rows in made.items():
        carried.rows.at(key, place)[:] = rows.unflatten(0, shape_of(place))
        fill = -1 if job.workload.workflow.shapes[key] in TOKEN_SHAPES else 0
        made[key] = torch.where(goes_on_B.view(-1, *[1] * (rows.dim() - 1)), fill, rows)
    meter.add(HELD, goes_on_N.sum(), len(goes_on_N))
    parts_G = torch.arange(responses_BG.shape[1], device=responses_BG.device) // job.workload.partial_steps
    lags_N = (data.lag + age_B[:, None] - parts_G)[made[call.outputs[0]] >= 0]
    meter.add(TOKEN_LAG, lags_N.sum(), len(lags_N))
    if len(lags_N):
        meter.maximum("lag", lags_N.max())
    return ~goes_on_B


def drawn_now(workload: Workload, data: Iteration, place: Place) -> Tensor:
    """Returns which tokens, if they are there, the weights of this iteration have drawn: bool [M, C, G]."""
    start_BG = _ages(data, place)[:, None] * workload.partial_steps
    drawn_BG = torch.arange(workload.max_response) >= start_BG
    return drawn_BG.unflatten(0, shape_of(place)).to(data.store.device)


def agree_on_carried(job: Job, data: Iteration) -> None:
    """Informs all ranks of the rows that go on. Collective."""
    assert data.carried is not None
    goes_on = data.carried.goes_on_MC.reshape(-1)
    for places in job.world.allgather(np.flatnonzero(goes_on).tolist(), f"{data.title}: the responses that go on"):
        goes_on[places] = True


def _ages(data: Iteration, place: Place) -> Tensor:
    """Returns for how many iterations rows have been sampled before this one: int64 [B]."""
    assert data.carried is not None
    return torch.from_numpy(data.number - data.carried.began_MC[place]).flatten()


def _limits(workload: Workload, age_B: Tensor) -> Tensor:
    """Returns how many tokens responses have at most at the end of an iteration."""
    return ((age_B + 1) * workload.partial_steps).clamp(max=workload.max_response)


def _is_cut(job: Job, responses_BG: Tensor, limit_B: Tensor) -> Tensor:
    """Returns which responses have reached their limit in an iteration, but not an end, as all do at 0: bool [B]."""
    limit_B = limit_B.to(responses_BG.device)
    cut_B = ((responses_BG >= 0).sum(1) == limit_B) & (limit_B < responses_BG.shape[1])
    for limit in limit_B[cut_B & (limit_B > 0)].unique().tolist():
        (rows,) = torch.nonzero(cut_B & (limit_B == limit), as_tuple=True)
        cut_B[rows] = ~job.ended(responses_BG[rows, :limit])
    return cut_B
