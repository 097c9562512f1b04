"""The search's model of an iteration agrees with the program that it stands for."""

import random
from dataclasses import replace
from math import inf

import pytest

from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.cost.memory import peak_bytes, static_bytes, working_bytes
from rlhf_spmd.plan.cost.seconds import Cost
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.search.exact import Best, Space
from rlhf_spmd.plan.search.iteration_model import CallModel
from rlhf_spmd.plan.search.meshes import layouts, meshes
from rlhf_spmd.plan.search.planner import filled
from rlhf_spmd.plan.search.priors import priors_in_chain
from tests.unit.plan.search.test_planner import A100, llama, model_of, on_one_base


@pytest.mark.parametrize("layout", ["2x4", "mixed"])
def test_every_candidate_compiles_beside_any_other(layout):
    model = model_of(layout, old_logprobs="recompute")
    workload, cluster = model.workload, model.cluster
    every = [
        [one for mesh in meshes(cluster) for one in layouts(call, mesh, workload, cluster)] for call in model.calls
    ]
    draw = random.Random(0)
    for _ in range(30):
        chosen = {call.name: draw.choice(of) for call, of in zip(model.calls, every, strict=True)}
        compile_program(workload, Placement(chosen), cluster)


@pytest.mark.parametrize(
    "preset, layout, overrides",
    [
        ("llama-13b", "1x8", ["ppo.old_logprobs=recompute"]),
        *(pytest.param("llama-70b", layout, [], marks=pytest.mark.slow) for layout in ("2x8", "4x8")),
        pytest.param("llama-7b", "1x8", ["lora.rank=16"], marks=pytest.mark.slow),
        ("llama-7b", "1x8", ["lora.rank=16", "one base"]),
    ],
)
def test_score_agrees_with_programs(preset, layout, overrides):
    """Seconds within a sixth of the forecast, and never fewer bytes than memory.py counts, nor many more. (More with
    adapters, beside which activations weigh more: the search has the stage with most of these everywhere, and counts
    those of inference on many rows.)"""
    workload, cluster = llama(preset, layout, *(one for one in overrides if one != "one base"))
    workload = on_one_base(workload) if "one base" in overrides else workload
    roomy = Cluster(tuple(replace(node, device_bytes=None) for node in cluster.nodes))  # many choices would not fit
    model, draw = CallModel(Cost(A100, workload, cluster)), random.Random(1)
    lists = [model.costs.candidates(call) for call in model.calls]
    for _ in range(3):
        chosen = [draw.choice(of) for of in lists]
        program = compile_program(workload, model.placement(chosen), cluster)
        assert model.schedule_s(chosen, range(len(model.calls))) == pytest.approx(
            forecast(compile_program(workload, program.placement, roomy), A100).makespan_s, rel=1 / 6
        )
        need = max(peak_bytes(static_bytes(program, r), working_bytes(program, r)) for r in cluster.ranks)
        mine = model.excess_bytes(chosen) + cluster.usable_bytes(0)
        assert need <= mine <= (1.05 if "lora" not in "".join(overrides) else 1.15) * need


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


@pytest.mark.parametrize(("epochs", "train_first"), [(1, True), (4, False)])
def test_one_iteration_ahead_agrees_with_programs(epochs, train_first):
    """Where drawing takes longest, and where training does; and no call may share a rank with training."""
    workload, cluster = llama("llama-7b", "2x8", f"ppo.epochs={epochs}")
    model = CallModel(Cost(A100, workload, cluster), ahead=1)
    lists = [model.costs.candidates(call) for call in model.calls]
    spans = {True: (0, 8), False: (8, 16)}
    halves = [
        quickest_on(of, spans[(call.kind == "train") == train_first])
        for of, call in zip(lists, model.calls, strict=True)
    ]
    program = compile_program(workload, replace(model.placement(halves), ahead=1), cluster)
    assert model.score_s(halves) == pytest.approx(forecast(program, A100).makespan_s, rel=0.1)
    assert model.excess_bytes(halves) < inf == model.excess_bytes([*halves[:-1], quickest_on(lists[-1], (0, 16))])
    assert model.phases == [[0], [1, 2, 3], [4, 5]] and model.lines == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("preset", "layout", "epochs"),
    [("llama-7b", "1x8", 2), pytest.param("llama-13b", "2x8", 1, marks=pytest.mark.slow)],
)
def test_iterations_in_a_chain_agree_with_programs(preset, layout, epochs):
    """On meshes on which they overlap: within 3%, and with streaming, where training is apart, within a fifth. A lower
    bound is one."""
    workload, cluster = llama(preset, layout, f"ppo.epochs={epochs}")
    space = Space.of(CallModel(Cost(A100, workload, cluster)))
    model, seen = space.model.in_chain(), set()
    assert model.can_chain and not space.model.chain
    for prior in priors_in_chain(space):
        chosen = filled(Space(model, space.candidates), prior, Best(1))
        if chosen is None or prior[0][0] == 0:  # which is mirrored
            continue
        stream, num = model.may_stream(chosen), workload.num_mini_batches
        placement = replace(model.placement(chosen), chain=True, stream=stream, decode_mini_batches=num)
        program = compile_program(workload, placement, cluster)
        expected_s = forecast(program, A100).makespan_s
        assert model.score_s(chosen) == pytest.approx(expected_s, rel=0.2 if stream else 0.03)
        assert model.score_s(chosen) >= model.score_s(chosen, 0.0) > 0.0
        seen.add(stream)
    assert seen == {False, True}


@pytest.mark.parametrize(
    ("algorithm", "layout", "can"),
    [("ppo", "1x4", True), ("ppo", "1x1", False), ("grpo", "1x4", False), ("dpo", "1x4", True)],
)
def test_a_chain_gains_if_a_model_trains_that_the_first_call_does_not_need(algorithm, layout, can):
    workload = make_workload(load("llama-7b", algorithm=algorithm))
    model = CallModel(Cost(A100, workload, Cluster.parse(layout, "a100-80g")))
    assert model.can_chain == can
    assert not CallModel(Cost(A100, replace(workload, may_chain=False), model.cluster)).can_chain


def quickest_on(candidates, mesh):
    return next(one for one in candidates if (one.first, one.stop) == mesh)
