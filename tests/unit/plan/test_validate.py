"""A placement that does not fit names call, ranks and mend."""

from dataclasses import replace

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.pages.algorithm import load_algorithm
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout, format_ranks
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.search.meshes import layouts as layouts_of
from rlhf_spmd.plan.search.meshes import meshes
from rlhf_spmd.plan.search.planner import search
from rlhf_spmd.plan.validate import validate
from rlhf_spmd.plan.workload import ModelShape, Workload
from tests.programs import make_workload
from tests.unit.plan.test_placement import EVERYONE


def refused(layouts: dict[str, object], *, size: int = 4) -> str:
    workload = make_workload()
    whole = {call.name: EVERYONE for call in workload.workflow.placed_calls} | layouts
    placement = Placement({name: layout for name, layout in whole.items() if layout is not None})
    with pytest.raises(UserError) as error:
        validate(placement, workload, Cluster.parse(f"1x{size}"))
    return str(error.value)


@pytest.mark.parametrize(
    ("layouts", "words"),
    [
        ({"critic_infer": None}, ["call critic_infer has no layout", "add it"]),
        ({"critic_guess": EVERYONE}, ["critic_guess is not a call", "actor_generate", "critic_infer"]),
        ({"reward_infer": (0, 1)}, ["call reward_infer: (0, 1) is not a Layout"]),
        ({"reward_infer": Layout.data_parallel(())}, ["call reward_infer: no rank is left for it"]),
        (
            {"actor_train": Layout.data_parallel((0, 9))},
            ["actor_train on ranks 0,9", "rank 9", "ranks 0 to 3", "10 ranks"],
        ),
        (
            {"actor_train": Layout.data_parallel((-1, 0))},
            ["call actor_train on ranks -1,0: rank -1 is outside the world of ranks 0 to 3"],
        ),
        ({"reward_infer": Layout.data_parallel((1, 1))}, ["reward_infer on ranks 1,1", "twice", "once"]),
        ({"actor_train": Layout.data_parallel((0, 1), zero=7)}, ["actor_train on ranks 0-1", "ZeRO stage 7", "use 0"]),
        (
            {"reward_infer": Layout((0, 1, 2), dp=1, tp=3)},
            ["reward_infer on ranks 0-2", "tp 3", "1 key-value heads of reward", "lower tp to 1"],
        ),
        ({"reward_infer": Layout((0, 1, 2), dp=1, pp=3)}, ["pp 3 is more than the 2 layers of reward", "lower pp"]),
        ({"reward_infer": Layout((1, 0), dp=1, tp=2)}, ["ranks [1, 0], which hold one copy", "do not ascend"]),
        ({"actor_train": Layout((0, 1), dp=1, pp=2, zero=3)}, ["actor_train", "ZeRO 3 with pp 2", "use ZeRO 0 to 2"]),
        ({"reward_infer": Layout((1, 0), dp=1, pp=2)}, ["ranks [1, 0], which hold one copy", "do not ascend"]),
        ({"actor_train": Layout((0, 1), dp=2, pp=2)}, ["actor_train", "is not the number of ranks, 2"]),
        ({"reward_infer": Layout.data_parallel((1,), recompute=True)}, ["recompute", "only training has"]),
        (
            {"actor_generate": Layout.data_parallel((1,), offload=True)},
            ["offload is for frozen models and for calls that train"],
        ),
        (
            {"actor_train": Layout.data_parallel((0, 1), offload=True, zero=3)},
            ["actor_train on ranks 0-1: ZeRO 3 (by DeepSpeed) keeps the optimizer's states", "or use ZeRO 0 to 2"],
        ),
        ({"reward_infer": Layout.data_parallel((1,), offload=True, zero=3)}, ["without offload"]),
        (
            {"reward_infer": Layout.data_parallel((1,), tokens=9, micro_batch=3)},
            ["micro_batch 3 and tokens 9", "give one of them"],
        ),
        ({"reward_infer": Layout((0, 1), dp=-2, pp=-1)}, ["reward_infer on ranks 0-1", "is less than 1"]),
        (
            {"reward_infer": Layout.data_parallel((1,), zero=2)},
            ["reward_infer on ranks 1: reward does not train", "use ZeRO 0, or 3 in all"],
        ),
    ],
)
def test_a_placement_that_does_not_fit_names_call_ranks_and_mend(layouts, words):
    text = refused(layouts)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(("ranks", "zero"), [((2, 3), 2), ((0, 1), 1), ((2, 3), 3)])
def test_zero_where_a_model_does_not_train_so_would_be_ignored(ranks, zero):
    """The weights of a shadow are whole: only where its model trains, and as it trains, can they be sharded."""
    home = Layout.data_parallel((0, 1), zero=2)
    text = refused({"actor_train": home, "actor_generate": Layout.data_parallel(ranks, zero=zero)})
    assert f"call actor_generate on ranks {format_ranks(ranks)}: ZeRO {zero} would be ignored" in text
    assert "actor trains on ranks 0-1 with dp2 pp1 tp1 zero2; use zero=0 here, and set the stage of actor_train" in text


MIXTURE = ModelShape(2, 8, 16, 8, 4, 4, 32, num_experts=6, experts_per_token=2, expert_size=4)


@pytest.mark.parametrize(
    ("shape", "layout", "kind", "text"),
    [
        (MIXTURE, {"tp": 4}, "cpu", "tp 4 cannot cut actor, which has 6 experts, .*; use tp 3"),
        (MIXTURE, {"zero": 2}, "cpu", "ZeRO 2 is not for actor, a mixture of experts; use ZeRO 0 or 1, or split it"),
        (MIXTURE, {"zero": 3}, "cpu", "ZeRO 3 is not for actor"),
        (
            MIXTURE,
            {"tp": 2},
            "a100-80g",
            r"mixtures of experts \(actor, .*\) run on CPUs alone; use dense models on GPUs",
        ),
    ],
)
def test_what_mixtures_cannot_have_is_refused_and_not_searched(shape, layout, kind, text):
    workload, cluster = make_workload(shape=shape), Cluster.parse("1x4", kind)
    grid = Layout.grid_of(range(4), **layout)
    layouts = dict.fromkeys((call.name for call in workload.workflow.placed_calls), grid)
    with pytest.raises(UserError, match=text):
        validate(Placement(layouts), workload, cluster)
    for call in workload.workflow.placed_calls if kind == "cpu" else ():
        found = [one for mesh in meshes(cluster) for one in layouts_of(call, mesh, workload, cluster)]
        assert found and all(one.zero < 2 and shape.most_tp(one.tp) == one.tp for one in found)
        assert {one.tp for one in found} == {1, 2, 3}
    assert workload.largest_tp(cluster) == 2
    if kind != "cpu":
        with pytest.raises(UserError, match=text):
            search(workload, cluster, load_calibration(kind))


def test_experts_are_not_counted_through_stages():
    workload, cluster = replace(make_workload(shape=MIXTURE), counted=frozenset({"actor_train"})), Cluster.parse("1x2")
    layouts = dict.fromkeys((call.name for call in workload.workflow.placed_calls), Layout.grid_of(range(2), pp=2))
    with pytest.raises(UserError, match="call actor_train .*the losses of routers need all layers of actor.*use pp 1"):
        validate(Placement(layouts), workload, cluster)
    call = workload.workflow.train_call("actor")
    assert all(one.pp == 1 for mesh in meshes(cluster) for one in layouts_of(call, mesh, workload, cluster))


def test_a_frozen_model_is_sharded_by_zero_3_where_all_its_calls_are():
    workload, cluster = make_workload(), Cluster.parse("1x4")
    layouts = dict.fromkeys((call.name for call in workload.workflow.placed_calls), EVERYONE)
    validate(Placement(layouts | {"reference_infer": Layout.data_parallel((2, 3), zero=3)}), workload, cluster)
    twice = _with_a_second_call("reference")
    second = {"reference_infer": Layout.data_parallel((2, 3), zero=3), "reference_again": EVERYONE}
    with pytest.raises(UserError, match="reference_again on ranks 0-3: .* use ZeRO 0, or 3 in all of them"):
        validate(Placement(layouts | second), twice, cluster)
    validate(Placement(layouts | second | {"reference_again": second["reference_infer"]}), twice, cluster)


def _with_a_second_call(model: str) -> Workload:
    workload = make_workload()
    call = workload.workflow.call(f"{model}_infer")
    again = replace(call, name=f"{model}_again", outputs=("again",))
    return replace(workload, workflow=replace(workload.workflow, calls=(*workload.workflow.calls, again)))


def test_episodes_are_drawn_in_slices_and_stages():
    """The planner looks for the same layouts as without an environment."""
    whole = make_workload()
    episodes = replace(whole, workflow=load_algorithm("ppo").workflow(load_algorithm("ppo").options(), episodes=True))
    layouts = {call.name: EVERYONE for call in whole.workflow.placed_calls}
    cluster = Cluster.parse("1x4")
    validate(Placement(layouts | {"actor_generate": Layout((0, 1), dp=1, pp=2)}), episodes, cluster)
    calls = [(one, one.workflow.call("actor_generate")) for one in (whole, episodes)]
    found = [
        [one for mesh in meshes(cluster) for one in layouts_of(call, mesh, workload, cluster)]
        for workload, call in calls
    ]
    assert found[0] == found[1] and max(one.pp * one.tp for one in found[1]) > 1
