"""ReaL's search (arXiv 2406.14088): a Metropolis walk over choices, from the quickest candidate of each call.

A step proposes another candidate for one call, each with the same chance. A quicker choice is accepted, a slower one
with the probability exp(-difference / TEMPERATURE_S), where a choice that does not fit counts as PENALTY times as slow.
The numbers are those of ReaL's release, which walks for two minutes of the clock; here a budget of steps ends the walk.
"""

from collections.abc import Sequence
from math import exp
from random import Random

from rlhf_spmd.plan.search.budget import Budget
from rlhf_spmd.plan.search.candidates import Candidate
from rlhf_spmd.plan.search.exact import Best, Space

NUM_CANDIDATES = 1_000  # of a call, the quickest
TEMPERATURE_S = 100.0  # beta of 0.001 for a tenth of a second
PENALTY = 3.0


def markov_chain(space: Space, best: Best, budget: Budget, seed: int = 0) -> None:
    """Walks until the budget is spent; the same choices for the same seed."""
    draw, quick = Random(seed), [of[:NUM_CANDIDATES] for of in space.candidates]
    proposals = [(index, one) for index, of in enumerate(quick) for one in of]
    chosen = [of[0] for of in quick]
    seconds = _seconds(space, chosen, best)
    while not budget.is_spent:
        budget.taken += 1
        index, proposed = draw.choice(proposals)
        before, chosen[index] = chosen[index], proposed
        other_s = _seconds(space, chosen, best)
        if other_s <= seconds or draw.random() < exp((seconds - other_s) / TEMPERATURE_S):
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
