"""Generation of episodes: the engine's seconds, and those in which rows wait for tools.

For the engine an answer is a part of the prompt: it is prefilled, and what is left of a response is decoded. A wait of
a row costs the others nothing, so generation takes the longest of three:

    the engine's own seconds;
    those of the row that waits longest, and of its decode steps;
    those of all rows one after another in the places of the batch, which a waiting row keeps.

A wait is lognormal with a mean and a 95th percentile. The waits of a row together are lognormal with the mean and the
variance of their sum (Fenton, The sum of log-normal probability distributions, 1960), the longest of n rows is its
quantile (n - 3/8) / (n + 1/4) (Blom, Statistical estimates and transformed beta-variables, 1958).
"""

import math
from dataclasses import replace
from statistics import NormalDist

from rlhf_spmd.plan.cost.seconds import Cost, Lengths
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.workflow import Generate, ModelCall
from rlhf_spmd.plan.workload import Answers, Workload

NORMAL = NormalDist()
P95 = NORMAL.inv_cdf(0.95)


def generate_s(
    cost: Cost, call: ModelCall, layout: Layout, rank: int, rows: Lengths, places: int, parts: int = 1
) -> list[float]:
    """Returns when each row ends, as Cost.generate_s says, with the waits of episodes."""
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


def longest_s(answers: Answers, num_rows: int) -> float:
    """Returns the expected seconds for which the row that waits longest does so."""
    waits = answers.turns - 1
    if waits <= 0 or not answers.mean_s:
        return 0.0
    mean_s = waits * answers.mean_s
    variance = math.log(1 + math.expm1(_sigma(answers) ** 2) / waits)  # of the logarithm of the sum
    place = NORMAL.inv_cdf((num_rows - 0.375) / (num_rows + 0.25))
    return max(mean_s, mean_s * math.exp(math.sqrt(variance) * place - variance / 2))


def _sigma(answers: Answers) -> float:
    """Returns the standard deviation of a wait's logarithm: the smaller root of p95 = mean exp(sigma z - sigma^2 / 2).
    Where there is none, the one with which p95 / mean is largest."""
    ratio = math.log(max(1.0, answers.p95_s / answers.mean_s))
    return P95 - math.sqrt(max(0.0, P95**2 - 2 * ratio))


def _drawn(workload: Workload, tokens: int) -> Workload:
    """Returns the workload of the engine, for which answers are parts of prompts."""
    lengths = workload.forecast_lengths
    if lengths is not None:
        rows = tuple(max(1, length - tokens) for length in lengths.rows)
        mean = sum(rows) / len(rows) if rows else max(1.0, lengths.mean - tokens)
        prompts = tuple(length + tokens for length in lengths.prompts)
        lengths = replace(lengths, mean=mean, rows=rows, prompts=prompts)
    prompt, response = workload.max_prompt + tokens, max(1, workload.max_response - tokens)
    return replace(workload, max_prompt=prompt, max_response=response, forecast_lengths=lengths)
