"""ReaL's search (arXiv 2406.14088): a Metropolis walk over choices, from the quickest candidate of each call.

A step proposes another candidate for one call, each with the same chance. A quicker choice is accepted, a slower one
with the probability exp(-difference / temperature), where a choice that does not fit counts as PENALTY times as slow.

The candidates of a call and the penalty are those of ReaL's release. Its temperature of 100 s suits no iteration of
less (bench/LOG.md); here it falls, as a share of the seconds of the choice. The release walks for two minutes of the
clock, this walk for a budget of steps, so that it ends alike everywhere; a local search ends it.
"""

from collections.abc import Sequence
from math import exp
from random import Random

from rlhf_spmd.plan.search.budget import Budget
from rlhf_spmd.plan.search.candidates import Candidate
from rlhf_spmd.plan.search.exact import Best, Space

NUM_CANDIDATES = 1_000  # of a call, the quickest
HOT, COLD = 0.1, 0.0005  # first and last temperature
PENALTY = 3.0


def markov_chain(space: Space, best: Best, budget: Budget, seed: int = 0) -> None:
    """Walks until the budget is spent; the same choices for the same seed."""
    draw, quick = Random(seed), [of[:NUM_CANDIDATES] for of in space.candidates]
    chosen = [of[0] for of in quick]
    seconds, start = _seconds(space, chosen, best), budget.taken
    while not budget.is_spent:
        temperature_s = seconds * HOT * (COLD / HOT) ** ((budget.taken - start) / (budget.steps - start))
        budget.taken += 1
        index = draw.randrange(len(quick))
        before, chosen[index] = chosen[index], draw.choice(quick[index])
        other_s = _seconds(space, chosen, best)
        if other_s <= seconds or draw.random() < exp((seconds - other_s) / temperature_s):
            seconds = other_s
        else:
            chosen[index] = before


def _seconds(space: Space, chosen: Sequence[Candidate], best: Best) -> float:
    """Scores a choice, and offers it if it fits."""
    seconds = space.model.score_s(chosen)
    best.num_scored += 1
    if space.model.excess_bytes(chosen) > 0:
        return PENALTY * seconds
    best.offer(seconds, chosen)
    return seconds
