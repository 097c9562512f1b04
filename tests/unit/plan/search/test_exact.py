"""The exact search against all combinations."""

import random
from dataclasses import replace
from itertools import product
from math import inf

import pytest

from rlhf_spmd.config import presets
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.memory import most_bytes
from rlhf_spmd.plan.cost.seconds import Cost
from rlhf_spmd.plan.search.budget import Budget
from rlhf_spmd.plan.search.exact import Best, Space, exact
from rlhf_spmd.plan.search.iteration_model import CallModel
from rlhf_spmd.plan.search.markov_chain import markov_chain
from rlhf_spmd.plan.search.planner import choose, simulated
from tests.unit.plan.search.test_planner import A100, CLUSTERS, llama, model_of, model_on_one_base


def brute_force_s(space: Space) -> float:
    fitting = (chosen for chosen in product(*space.candidates) if space.model.excess_bytes(chosen) <= 0)
    return min(map(space.model.score_s, fitting), default=float("inf"))


def small_space(model: CallModel, draw: random.Random, most: int) -> Space:
    """Returns a few candidates of each call, quick ones first, as the search wants them. One ahead, those that leave
    ranks to others."""
    lists = []
    for call in model.calls:
        every = [one for one in model.costs.candidates(call) if not model.ahead or 2 * len(one.ranks) <= 8]
        some = draw.sample(every, min(most, len(every)))
        lists.append(tuple(sorted(some, key=lambda one: one.seconds)))
    return Space(model, tuple(lists))


@pytest.mark.parametrize("place", range(len(CLUSTERS)), ids=list(CLUSTERS))
@pytest.mark.parametrize("limit", range(4))
def test_exact_is_brute_force(place, limit):
    """Also under memory limits that bite, and where streaming is the best."""
    num_bytes = (None, 2_500_000, 1_500_000, 900_000)[limit]
    model = model_of(list(CLUSTERS)[place], num_bytes, epochs=1 + (place + limit) % 2)
    space, best = small_space(model, random.Random(limit), 3), Best(20)
    assert exact(space, best, Budget()) == best.seconds == pytest.approx(brute_force_s(space), rel=1e-9)


@pytest.mark.parametrize("num_bytes", [pytest.param(None, marks=pytest.mark.slow), 1_500_000])
def test_the_markov_chain_finds_the_best_of_a_small_space(num_bytes):
    """And the same choices again, by its seed."""
    space, found = small_space(model_of("2x4", num_bytes), random.Random(0), 3), []
    for _ in range(2):
        best = Best(20)
        markov_chain(space, best, Budget(20_000))
        found.append(best.choices)
    assert best.seconds == pytest.approx(brute_force_s(space), rel=1e-9)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("num_bytes", "epochs"), [(None, 1), (12_800_000, 3), pytest.param(12_200_000, 1, marks=pytest.mark.slow)]
)
def test_exact_is_brute_force_one_iteration_ahead(num_bytes, epochs):
    """Now the calls that draw take longest, now those that train."""
    model, seconds = model_of("2x4", num_bytes, epochs=epochs, ahead=1), set()
    for seed in range(4):
        space, best = small_space(model, random.Random(seed), 4), Best(20)
        least_s = exact(space, best, Budget())
        assert least_s == best.seconds == pytest.approx(brute_force_s(space), rel=1e-9)
        seconds.add(best.seconds)
    assert len(seconds - {inf}) >= 2
    assert (inf in seconds) == (num_bytes is not None)


def test_exact_is_brute_force_where_ranks_that_train_have_little_room():
    """One iteration ahead: for the weights that they send to those that draw."""
    for seed in (0, 3):
        space, best = small_space(model_of("2x4", 13_000_000, epochs=1, ahead=1), random.Random(seed), 4), Best(20)
        assert exact(space, best, Budget()) == best.seconds == pytest.approx(brute_force_s(space), rel=1e-9)
        assert best.seconds < inf


def test_exact_is_brute_force_on_a_base_that_models_have_in_common():
    found = set()
    for num_bytes in (None, 4_000_000, 3_000_000, 2_300_000, 1_800_000):
        model = model_on_one_base("2x2", num_bytes)
        for seed in range(2):
            space, best = small_space(model, random.Random(seed), 3), Best(20)
            assert exact(space, best, Budget()) == best.seconds == pytest.approx(brute_force_s(space), rel=1e-9)
            found.add((seed, best.seconds))
    assert len(found) > 4


@pytest.mark.parametrize("gib", [80, pytest.param(96, marks=pytest.mark.slow)])
def test_caches_that_are_alive_at_the_same_time_count_while_streaming(gib):
    """ReMax generates twice. Plans that streamed needed more than a device has, because the larger cache counted."""
    workload, cluster = make_workload(presets.load("llama-7b", algorithm="remax")), Cluster.parse("1x4", "a100-80g")
    nodes = tuple(replace(node, device_bytes=gib * 2**30) for node in cluster.nodes)
    model, num_refused = CallModel(Cost(A100, workload, Cluster(nodes))), 0
    for seed in (0, 1):
        draw, lists = random.Random(seed), []
        for call in model.calls:  # training on ranks of its own
            mesh = (2, 4) if call.kind == "train" else (0, 2)
            every = [one for one in model.costs.candidates(call) if (one.first, one.stop) == mesh]
            lists.append(tuple(sorted(draw.sample(every, 3), key=lambda one: one.seconds)))
        space, best = Space(model, tuple(lists)), Best(20)
        fitting = [chosen for chosen in product(*space.candidates) if model.excess_bytes(chosen) <= 0]
        num_refused += sum(model.streams(chosen) and not model.may_stream(chosen) for chosen in fitting)
        assert exact(space, best, Budget()) == best.seconds == min(map(model.score_s, fitting))
        plans = simulated(space, best, "exact", A100)
        assert plans and all(most_bytes(plan.program) <= model.limits[0] for plan in plans)
        assert any(plan.placement.stream for plan in plans) == any(map(model.may_stream, fitting))
    assert num_refused


SLOW = [pytest.param(size, "8x8", marks=pytest.mark.slow) for size in ("7b", "13b", "33b", "65b", "70b")]
SLOW += [pytest.param("7b", layout, marks=pytest.mark.slow) for layout in ("1x3", "1x6", "1x8")]


@pytest.mark.parametrize(("size", "layout"), [("7b", "1x2"), *SLOW])
def test_two_phases_are_near_the_exact_method_whose_gap_is_honest(size, layout):
    """With its budget spent it is no worse than the local search, and no further from the best than it says."""
    workload, cluster = llama(f"llama-{size}", layout)
    space = Space.of(CallModel(Cost(A100, workload, cluster)))
    found, proved = choose(space, "exact", Best(20), Budget())
    local, none = choose(space, "two_phase", Best(20), Budget(0))
    spent, gap = choose(space, "exact", Best(20), Budget(0))
    assert proved == 0.0 and none is None and 0 < gap <= 1
    assert found.seconds <= spent.seconds <= local.seconds <= 1.02 * found.seconds
    assert found.seconds >= spent.seconds * (1 - gap) * (1 - 1e-9)
