"""The calls that the exact search chooses last, against every combination of a sample of their candidates."""

import random
from itertools import product

import pytest

from rlhf_spmd.config import options as config
from rlhf_spmd.config import presets
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.seconds import Cost
from rlhf_spmd.plan.search.budget import Budget
from rlhf_spmd.plan.search.exact import Space
from rlhf_spmd.plan.search.inference_phase import LastPhase, Left
from rlhf_spmd.plan.search.iteration_model import CallModel

LAST = (1, 2, 3)  # reference, reward and critic infer


@pytest.fixture(scope="module")
def space() -> Space:
    workload = config.make_workload(presets.load("llama-13b"))
    return Space.of(CallModel(Cost(load_calibration("a100-80g"), workload, Cluster.parse("1x8", "a100-80g"))))


def beginning(space: Space, draw: random.Random) -> list:
    """Returns a choice that fits for all other calls."""
    while True:
        chosen = [draw.choice(of) for of in space.candidates]
        for index in LAST:
            chosen[index] = None
        if space.model.excess_bytes(chosen) <= 0:
            return chosen


def brute_force(space: Space, chosen: list, lists: list) -> list[float]:
    """Returns seconds of the phase for all combinations that fit."""
    found, whole = [], list(chosen)
    for picked in product(*lists):
        for index, one in zip(LAST, picked, strict=True):
            whole[index] = one
        if space.model.excess_bytes(whole) <= 0:
            found.append(space.model.schedule_s(whole, LAST))
    return found


def test_the_quickest_that_fits_comes_first(space):
    model, fitting, full = space.model, 0, 0
    for seed in range(40):
        draw = random.Random(seed)
        chosen = beginning(space, draw)
        home = chosen[model.trained_by(3)]
        lists = [draw.sample(space.candidates[index], 8) for index in LAST]
        lists[2] += [one for one in space.candidates[3] if one.where == home.where][:2]  # it may share weights
        every = brute_force(space, chosen, lists)
        candidates = list(space.candidates)
        for index, of in zip(LAST, lists, strict=True):
            candidates[index] = of
        left, whole = Left.by(model, chosen, LAST), list(chosen)
        least_s = float("inf")
        for seconds, picked in LastPhase(model, candidates, LAST).combinations(chosen, left, 1e9, Budget()):
            for index, one in zip(LAST, picked, strict=True):
                whole[index] = one
            assert seconds == pytest.approx(model.schedule_s(whole, LAST), rel=1e-12)
            if model.excess_bytes(whole) <= 0:
                least_s = min(least_s, seconds)
        assert least_s == pytest.approx(min(every, default=float("inf")), rel=1e-12)
        fitting += bool(every)
        full += len(every) < len(lists[0]) * len(lists[1]) * len(lists[2])
    assert fitting > 20 and full > 20  # memory is there, and it is not there for all
