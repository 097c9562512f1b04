"""The search for placements: the exact method against brute force, the other methods against the exact one, the score
against programs, and what comes out against compile and check."""

import random
import time
from dataclasses import replace
from itertools import count, product

import pytest

from bench.forecast.markov_chain import mcmc
from rlhf_spmd.config import options as config
from rlhf_spmd.config import presets
from rlhf_spmd.errors import UserError
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster, Node
from rlhf_spmd.plan.cost.calibration import Calibration, Device, Link
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.cost.memory import peak_bytes, static_bytes, working_bytes
from rlhf_spmd.plan.cost.seconds import Cost
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.proof.check import check
from rlhf_spmd.plan.search import planner as searches
from rlhf_spmd.plan.search.budget import Budget
from rlhf_spmd.plan.search.exact import Best, Space, exact
from rlhf_spmd.plan.search.iteration_model import CallModel
from rlhf_spmd.plan.search.meshes import layouts, meshes
from rlhf_spmd.plan.search.planner import choose, name_of, search
from rlhf_spmd.plan.workload import ModelShape
from tests.programs import make_workload

A100 = load_calibration("a100-80g")
SHAPE = ModelShape(8, 64, 176, 8, 4, 8, 512)
DEVICES = {
    "fast": Device(4e9, 2e9, 1e9, 1e-5, 2e-5),
    "slow": Device(1e9, 1e9, 1e9, 1e-5, 2e-5),
}
SMALL = Calibration("small", DEVICES, Link(1e9, 1e-6), Link(1e8, 1e-5), "made up")
CLUSTERS = {
    "1x4": (Node(4, "fast"),),
    "2x2": (Node(2, "fast"),) * 2,
    "2x4": (Node(4, "fast"),) * 2,
    "mixed": (Node(4, "fast"), Node(4, "slow")),
}


def model_of(layout: str, num_bytes: int | None = None, **options) -> CallModel:
    nodes = tuple(replace(node, device_bytes=num_bytes) for node in CLUSTERS[layout])
    workload = make_workload(mini_batch=8, num_mini_batches=2, shape=SHAPE, **options)
    return CallModel(Cost(SMALL, workload, Cluster(nodes)))


def llama(preset: str, layout: str, *overrides: str) -> tuple:
    return config.make_workload(presets.load(preset, overrides)), Cluster.parse(layout, "a100-80g")


def test_meshes_are_slices_of_nodes_whole_nodes_and_eighths():
    found = {mesh.ranks for mesh in meshes(Cluster.parse("2x4"))}
    slices = {tuple(range(at, at + size)) for size in (1, 2, 4) for at in range(0, 8, size)}
    ends = {tuple(range(edge)) for edge in range(1, 9)} | {tuple(range(edge, 8)) for edge in range(8)}
    assert found == slices | ends


def test_no_mesh_has_two_types_of_devices():
    cluster = Cluster(CLUSTERS["mixed"])
    assert all(len({cluster.node_of(rank) for rank in mesh.ranks}) == 1 for mesh in meshes(cluster))


@pytest.mark.parametrize("layout", ["2x4", "mixed"])
def test_every_candidate_compiles_beside_any_other(layout):
    model = model_of(layout, old_logprobs="recompute")
    workload, cluster = model.workload, model.cluster
    every = [
        [one for mesh in meshes(cluster) for one in layouts(call, mesh, workload, cluster)] for call in model.calls
    ]
    draw = random.Random(0)
    for _ in range(60):
        chosen = {call.name: draw.choice(of) for call, of in zip(model.calls, every, strict=True)}
        compile_program(workload, Placement(chosen), cluster)


@pytest.mark.parametrize(
    "preset, layout, overrides", [("llama-13b", "2x8", ["ppo.old_logprobs=recompute"]), ("llama-70b", "4x8", [])]
)
def test_score_agrees_with_programs(preset, layout, overrides):
    """Seconds within a sixth of the forecast, and never fewer bytes than memory.py counts, nor many more."""
    workload, cluster = llama(preset, layout, *overrides)
    model, draw = CallModel(Cost(A100, workload, cluster)), random.Random(1)
    lists = [model.costs.candidates(call) for call in model.calls]
    for _ in range(15):
        chosen = [draw.choice(of) for of in lists]
        program = compile_program(workload, model.placement(chosen), cluster)
        assert model.schedule_s(chosen, range(len(model.calls))) == pytest.approx(
            forecast(program, A100).makespan_s, rel=1 / 6
        )
        need = max(peak_bytes(static_bytes(program, r), working_bytes(program, r)) for r in cluster.ranks)
        mine = model.excess_bytes(chosen) + cluster.usable_bytes(0)
        assert need <= mine <= 1.02 * need


def test_streaming_agrees_with_programs():
    workload, cluster = llama("llama-7b", "2x8", "ppo.epochs=2")
    model = CallModel(Cost(A100, workload, cluster))
    lists = [model.costs.candidates(call) for call in model.calls]
    spans = [(8, 16) if call.kind == "train" else (0, 8) for call in model.calls]
    halves = [quickest_on(of, span) for of, span in zip(lists, spans, strict=True)]
    assert model.streams(halves)
    program = compile_program(workload, replace(model.placement(halves), stream=True), cluster)
    assert model.streamed_s(halves) == pytest.approx(forecast(program, A100).makespan_s, rel=0.1)
    assert not model.streams([*halves[:-1], quickest_on(lists[-1], (0, 16))])


def quickest_on(candidates, mesh):
    return next(one for one in candidates if (one.first, one.stop) == mesh)


def test_slices_may_be_unequal():
    """LLaMA 33B has 52 heads: of 8 slices, some have 7 and some 6."""
    workload, cluster = llama("llama-33b", "2x8")
    for call in workload.workflow.placed_calls:
        found = list(layouts(call, meshes(cluster)[0], workload, cluster))
        assert {one.tp for one in found} == {1, 2, 4, 8}


def test_phases_are_cut_where_everything_needs_everything_before():
    assert model_of("1x4").phases == [[0], [1, 2, 3], [4, 5]]
    assert model_of("1x4", old_logprobs="recompute").phases == [[0], [1, 2, 3, 4], [5, 6]]


def brute_force_s(space: Space) -> float:
    fitting = (chosen for chosen in product(*space.candidates) if space.model.excess_bytes(chosen) <= 0)
    return min(map(space.model.score_s, fitting), default=float("inf"))


def small_space(model: CallModel, draw: random.Random, most: int) -> Space:
    """A few candidates of each call, quick ones first, as the search wants them."""
    lists = []
    for call in model.calls:
        every = model.costs.candidates(call)
        some = draw.sample(every, min(most, len(every)))
        lists.append(tuple(sorted(some, key=lambda one: one.seconds)))
    return Space(model, tuple(lists))


@pytest.mark.parametrize("layout", list(CLUSTERS))
@pytest.mark.parametrize("num_bytes", [None, 2_500_000, 1_500_000, 900_000])
@pytest.mark.parametrize("epochs", [1, 2])
def test_exact_is_brute_force(layout, num_bytes, epochs):
    """Also under memory limits that bite, and where streaming is the best."""
    model = model_of(layout, num_bytes, epochs=epochs)
    for seed in range(6):
        space = small_space(model, random.Random(seed), 4)
        best = Best(20)
        least_s = exact(space, best, Budget())
        assert best.seconds == pytest.approx(brute_force_s(space), rel=1e-9)
        assert least_s == best.seconds


def test_memory_limits_of_the_brute_force_test_bite():
    """Between the limits the best time changes, and below the least nothing fits: the test above means something."""
    found = []
    for num_bytes in (None, 2_500_000, 1_500_000, 900_000):
        space = small_space(model_of("2x4", num_bytes), random.Random(0), 4)
        found.append(brute_force_s(space))
    assert found == sorted(found) and len(set(found)) > 1


def test_streaming_wins_somewhere():
    model = model_of("2x4", epochs=1)
    wins = 0
    for seed in range(6):
        space = small_space(model, random.Random(seed), 4)
        for chosen in product(*space.candidates):
            wins += model.score_s(chosen) < model.schedule_s(chosen, range(len(model.calls)))
    assert wins


def test_a_spent_budget_is_no_worse_than_the_local_search():
    workload, cluster = llama("llama-7b", "1x8")
    space = Space.of(CallModel(Cost(A100, workload, cluster)))
    best, gap = choose(space, "exact", Best(20), Budget(0))
    assert gap > 0 and best.seconds <= choose(space, "two_phase", Best(20), Budget(0))[0].seconds


def test_a_spent_budget_leaves_an_honest_gap():
    workload, cluster = llama("llama-70b", "8x8")
    space = Space.of(CallModel(Cost(A100, workload, cluster)))
    best, gap = choose(space, "exact", Best(20), Budget(0))
    later, proved = choose(space, "exact", Best(20), Budget())
    assert 0 < gap < 1 and proved == 0.0
    assert later.seconds >= best.seconds * (1 - gap) * (1 - 1e-9)


SLOW = [pytest.param(size, marks=pytest.mark.slow) for size in ("13b", "33b", "65b", "70b")]


@pytest.mark.parametrize("size", ["7b", *SLOW])
def test_other_methods_are_near_the_exact_one(size):
    workload, cluster = llama(f"llama-{size}", "8x8")
    space = Space.of(CallModel(Cost(A100, workload, cluster)))
    found, gap = choose(space, "exact", Best(20), Budget())
    assert gap == 0.0
    assert choose(space, "two_phase", Best(20), Budget(0))[0].seconds <= 1.02 * found.seconds
    chain = Best(20)
    mcmc(space, chain, seed=0)
    assert chain.seconds <= 1.02 * found.seconds


@pytest.mark.parametrize(
    "preset, layout", [("tiny", "1x4"), ("llama-7b", "1x8"), ("llama-13b", "2x8"), ("llama-70b", "8x8")]
)
def test_plans_compile_and_fit(preset, layout):
    workload, cluster = llama(preset, layout)
    found = search(workload, cluster, A100, keep=3)
    seconds = [plan.forecast.makespan_s for plan in found.plans]
    assert seconds == sorted(seconds) and found.num_scored > 0
    for plan in found.plans:
        assert not [finding for finding in check(plan.program) if finding.severity == "error"]
        assert plan.forecast.makespan_s == pytest.approx(plan.call_level_s, rel=0.2)


def test_search_is_the_same_every_time():
    workload, cluster = llama("llama-7b", "1x8")
    one, other = (search(workload, cluster, A100, method="two_phase", keep=1) for _ in range(2))
    assert [plan.placement for plan in one.plans] == [plan.placement for plan in other.plans]
    assert one.gap is None


def test_no_clock_decides(monkeypatch):
    """Where hours pass between two looks at the clock, the search is as complete and its plans are the same."""
    workload, cluster = llama("llama-7b", "1x8")
    before = search(workload, cluster, A100, keep=1)
    hours = count(step=3600.0)
    for name in ("perf_counter", "monotonic", "time", "process_time"):
        monkeypatch.setattr(time, name, lambda: next(hours))
    after = search(workload, cluster, A100, keep=1)
    assert [plan.placement for plan in after.plans] == [plan.placement for plan in before.plans]
    assert after.gap == before.gap == 0.0 and after.num_scored == before.num_scored


def test_a_plan_that_streams_has_the_quickest_fields_of_its_stream():
    """No other number of mini-batches decoded at once, or in flight, makes its program quicker."""
    workload, cluster = llama("llama-7b", "2x8", "mini_batch=32", "rollout_batch=256")
    placement = load_strategy("separation").place(workload, cluster, training_tp=2, recompute=True, zero=2)
    program = compile_program(workload, placement, cluster)
    plan = searches.Plan("separation", placement, program, forecast(program, A100), 0.0)
    tuned = searches._tuned(plan, A100)
    assert tuned.forecast.makespan_s < plan.forecast.makespan_s
    assert tuned.placement.layouts == placement.layouts and check(tuned.program) == []
    for number in (1, 2, 4, 8):
        other = compile_program(workload, replace(tuned.placement, decode_mini_batches=number), cluster)
        assert forecast(other, A100).makespan_s >= tuned.forecast.makespan_s * (1 - 1e-9)


def test_reward_functions_run_where_rows_are_made():
    workload = make_workload(mini_batch=8, num_mini_batches=2, shape=SHAPE)
    workload = replace(workload, models={**workload.models, "reward": None})
    cluster = Cluster(CLUSTERS["2x4"])
    for plan in search(workload, cluster, SMALL, keep=3).plans:
        where = plan.placement.layouts
        assert set(where["reward_infer"].ranks) <= set(where["actor_generate"].ranks)
        assert (where["reward_infer"].pp, where["reward_infer"].tp) == (1, 1)


def test_unknown_methods_are_refused():
    with pytest.raises(UserError, match="unknown search method 'greedy'; known: exact, two_phase"):
        search(*llama("llama-7b", "1x8"), A100, method="greedy")


def test_names_are_those_of_the_strategies():
    workload, cluster = make_workload(shape=SHAPE), Cluster.parse("1x4")

    def name(**changes) -> str:
        everyone = Layout.data_parallel(range(4))
        found = {call.name: everyone for call in workload.workflow.placed_calls} | changes
        return name_of(Placement(found), workload, cluster)

    front, behind = Layout.data_parallel((0, 1)), Layout.data_parallel((2, 3))
    assert name() == "flattening"
    assert name(actor_generate=Layout.grid_of(range(4), tp=2)) == "reallocation"
    assert name(reference_infer=front, reward_infer=behind) == "interleaving"
    calls = [call.name for call in workload.workflow.placed_calls]
    apart = {call: front if call.endswith("_train") else behind for call in calls}
    assert name(**apart) == "separation"
    assert name(actor_train=front, critic_train=behind) == "mixed"
    workload, cluster = config.make_workload(presets.load("llama-7b", algorithm="sft")), Cluster.parse("1x4")
    assert name() == "flattening" and name(actor_train=front) == "mixed"  # nothing to be separate from
