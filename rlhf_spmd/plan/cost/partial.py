"""What an iteration draws and trains where responses take several iterations (Workload.partial_steps).

With S(x) = P(length > x), L steps and groups of s rows, a row takes k = sum_j S(jL) iterations in the mean, and a group
as many as its longest row, K = sum_j 1 - (1 - S(jL))^s. A place of the batch is a renewal process: after a while it
ends a group in 1 / K of the iterations, and its rows draw in k / K of them. What a row draws in an iteration is longer
than x with the probability sum_j S(jL + x) / k, and comes after sum_j jL S(jL) / k tokens in the mean.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from rlhf_spmd.plan.cost.lengths import constant, of_forecast
from rlhf_spmd.plan.workload import ResponseLengths, Workload

QUANTILES = 512  # of the lengths that an iteration draws


@dataclass(frozen=True, slots=True)
class Parts:
    """An iteration after a while.

    lengths: what it draws of rows, in quantiles.
    carried: tokens that they have before, in the mean.
    drawn, ended: shares of the rows of a batch that it draws, and that end and train.
    """

    lengths: tuple[int, ...]
    carried: float
    drawn: float
    ended: float


def parts_of(workload: Workload) -> Parts:
    """Returns the parts of a workload's responses. Raises UserError as of_forecast does."""
    sizes = workload.max_response, workload.partial_steps, workload.group_size
    return _parts_of(workload.forecast_lengths, *sizes)


@lru_cache
def _parts_of(lengths: ResponseLengths | None, limit: int, steps: int, size: int) -> Parts:
    """Implements parts_of."""
    whole = of_forecast(lengths, limit) if lengths is not None else constant(limit)
    cells = (np.arange(-(-limit // steps) * steps) / whole.step).astype(int)
    longer = np.where(cells < len(whole.survival), whole.survival[np.minimum(cells, len(whole.survival) - 1)], 0.0)
    longer_JX = longer.reshape(-1, steps)  # S(jL + x)
    begun_J = longer_JX[:, 0]
    parts, of_group = float(begun_J.sum()), float((1 - (1 - begun_J) ** size).sum())
    above = longer_JX.sum(0) / parts
    rows = (above[:, None] > (np.arange(QUANTILES) + 0.5) / QUANTILES).sum(0)
    carried = steps * float((np.arange(len(begun_J)) * begun_J).sum()) / parts
    return Parts(tuple(rows.tolist()), carried, parts / of_group, 1 / of_group)


def drawing(workload: Workload) -> Workload:
    """Returns the workload of the engine, for which the tokens that rows have already are parts of their prompts."""
    parts = parts_of(workload)
    prompts = [workload.row_lengths[0] + round(parts.carried)] * len(parts.lengths)
    lengths = ResponseLengths.of(parts.lengths, prompts)
    return replace(workload, max_response=workload.partial_steps, forecast_lengths=lengths, partial_steps=0)
