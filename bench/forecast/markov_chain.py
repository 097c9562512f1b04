"""ReaL's search (arXiv 2406.14088), for comparison: Metropolis-Hastings over the candidates of each call, with a
falling temperature."""

from math import exp
from random import Random

from rlhf_spmd.plan.search.candidates import Candidate
from rlhf_spmd.plan.search.exact import Best, Space
from rlhf_spmd.plan.search.iteration_model import CallModel
from rlhf_spmd.plan.search.planner import refine

NUM_CHAINS, NUM_STEPS = 2, 60_000  # Markov chains, and the steps of each: one in eight ends 10% or more above the best
NUM_CANDIDATES = 1_000  # per call in the Markov chain, the quickest (ReaL's cap)
HOT, COLD = 0.1, 0.0005  # first and last temperature, as a share of the seconds of an iteration
PENALTY = 3.0  # factor on the seconds of a choice that does not fit (ReaL's)


def mcmc(space: Space, best: Best, seed: int) -> None:
    """Metropolis-Hastings from each call's quickest candidate: a random candidate of a random call is proposed and
    accepted with probability exp(-(new - old) / temperature). Each chain has its own random numbers; the best choice of
    all is refined."""
    for chain in range(NUM_CHAINS):
        _walk(space, best, Random(seed * NUM_CHAINS + chain))
    if best.found:
        refine(space, best.choices[0][1], best)


def _walk(space: Space, best: Best, draw: Random) -> None:
    model = space.model
    lists = [of[:NUM_CANDIDATES] for of in space.candidates]
    current = [of[0] for of in lists]
    seconds = _penalized_s(model, current, best)
    for step in range(NUM_STEPS):
        temperature_s = HOT * (COLD / HOT) ** (step / NUM_STEPS) * seconds
        index = draw.randrange(len(lists))
        before = current[index]
        current[index] = draw.choice(lists[index])
        other_s = _penalized_s(model, current, best)
        if other_s <= seconds or draw.random() < exp((seconds - other_s) / temperature_s):
            seconds = other_s
        else:
            current[index] = before


def _penalized_s(model: CallModel, chosen: list[Candidate], best: Best) -> float:
    seconds = model.score_s(chosen)
    best.num_scored += 1
    if model.excess_bytes(chosen) <= 0:
        best.offer(seconds, chosen)
        return seconds
    return PENALTY * seconds
