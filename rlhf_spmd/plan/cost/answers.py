"""Generation of episodes: the engine's seconds, and those in which rows wait for tools.

For the engine an answer is a part of the prompt: it is prefilled, and the rest of a response is decoded. A wait of
a row costs the others nothing, so generation takes the longest of three:

    the engine's own seconds;
    those of the row that waits longest, and of its decode steps;
    those of all rows one after another in the slots of the batch, which a waiting row keeps.

A wait is lognormal with a mean and a 95th percentile. The waits of a row together are a convolution power on a grid,
and the longest of n rows is an expectation over it, E[longest] = sum of 1 - F^n, as in lengths.py: nothing is sampled.
"""

import math
from dataclasses import replace
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from rlhf_spmd.plan.calls import Generate, ModelCall
from rlhf_spmd.plan.cost.seconds import Cost, Lengths
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.workload import P95, Answers, Workload

CELLS = 1 << 15  # of the grid of the waits of a row
FAR = 8.0  # standard deviations of a normal variable that no row is beyond
Z = np.linspace(-FAR, FAR, 16001)
CHANCES = np.exp(-(Z**2) / 2) / np.exp(-(Z**2) / 2).sum()


def generate_s(
    cost: Cost, call: ModelCall, layout: Layout, rank: int, rows: Lengths, places: int, parts: int = 1
) -> list[float]:
    """Returns when each row ends, as Cost.generate_s does, with the waits of episodes."""
    answers = cost.workload.answers
    if answers is None or not isinstance(call, Generate) or not call.has_turns or not rows:
        return cost.generate_s(call, layout, rank, rows, places, parts)
    tokens = round(answers.tokens)
    drawn = [(prompt + tokens, max(1, response - tokens)) for prompt, response in rows]
    engine = replace(cost, workload=_drawn(cost.workload, tokens))
    done_s = engine.generate_s(call, layout, rank, drawn, places, parts)
    steps = sum(response for _, response in drawn) / len(drawn)
    together = min(places, len(rows))
    row_s = steps * sum(engine.decode_s(call, layout, other, together) for other in layout.stage_ranks(rank))
    wait_s = (answers.turns - 1) * answers.mean_s
    whole_s = max(max(done_s), row_s + longest_s(answers, len(rows)), len(rows) / together * (row_s + wait_s))
    return [one_s * whole_s / max(done_s) for one_s in done_s]


@lru_cache(maxsize=4096)
def longest_s(answers: Answers, num_rows: int) -> float:
    """Returns the expected seconds for which the row that waits longest does so. If their number is not
    whole, some rows have one more."""
    sigma, (waits, more) = _sigma(answers), divmod(answers.turns - 1, 1)
    if waits + more <= 0 or not answers.mean_s:
        return 0.0
    wait_s = answers.mean_s * np.exp(sigma * Z - sigma**2 / 2)
    last = min(FAR, 4 + NormalDist().inv_cdf(1 - 0.5 / (num_rows * (waits + 1))))
    most_s = (waits + 1) * answers.mean_s + math.sqrt(waits + 1) * float(np.interp(last, Z, wait_s))
    cells, step_s = np.minimum(wait_s / most_s * CELLS, CELLS), most_s / CELLS
    first = cells.astype(int)  # a wait lies between two cells, so that the mean is exact
    mass = np.bincount(first, CHANCES * (1 - (cells - first)), CELLS + 2)
    mass += np.bincount(first + 1, CHANCES * (cells - first), CELLS + 2)
    spectrum = np.fft.rfft(mass, 4 * CELLS)
    of_row = np.fft.irfft(spectrum**waits * (1 - more + more * spectrum), 4 * CELLS)
    below = np.clip(np.cumsum(of_row), 0.0, 1.0)
    return step_s * float((1 - below**num_rows).sum())


def _sigma(answers: Answers) -> float:
    """Returns the standard deviation of a wait's logarithm: the smaller root of p95 = mean exp(sigma z - sigma^2 /
    2)."""
    assert not answers.problem, answers.problem
    ratio = answers.p95_s / answers.mean_s if answers.mean_s else 1.0
    return P95 - math.sqrt(max(0.0, P95**2 - 2 * math.log(ratio)))  # rounded at the limit


def _drawn(workload: Workload, tokens: int) -> Workload:
    """Returns the workload of the engine, for which answers are parts of prompts."""
    lengths = workload.forecast_lengths
    if lengths is not None:
        left = max(0.0, 1 - tokens / lengths.mean)  # of each length: no row is all answers
        rows = tuple(max(1, round(left * length)) for length in lengths.rows)
        mean = sum(rows) / len(rows) if rows else max(1.0, left * lengths.mean)
        pairs = zip(lengths.prompts, lengths.rows, rows, strict=True) if lengths.prompts else ()
        prompts = tuple(prompt + whole - row for prompt, whole, row in pairs)
        lengths = replace(lengths, mean=mean, rows=rows, prompts=prompts)
    prompt, response = workload.max_prompt + tokens, max(1, workload.max_response - tokens)
    return replace(workload, max_prompt=prompt, max_response=response, forecast_lengths=lengths)
