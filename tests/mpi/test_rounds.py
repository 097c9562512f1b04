"""Groups that are drawn again in rounds: the same tokens, numbers and prompts used on any ranks under any placement.

python tests/run_mpi.py 2 4 5 -- tests/mpi/test_rounds.py
"""

from functools import partial

import pytest

from rlhf_spmd.config import presets
from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.strategies import flattening, interleaving1, interleaving2, reallocation, separation
from tests.folders import write_all
from tests.mpi.test_invariance import TOLERANCE, compare_metrics, load_run, save_run, weights_of, with_groups
from tests.programs import errors
from tests.runs import RunOf, compiled

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.usefixtures("cheap_garbage_collection"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]
REWARD = """
def few(prompts, responses):
    return [float(len(response.split()) > 4) + 0.5 * float("ba" in response) for response in responses]
"""
CONFIGS = {
    "function": ("{reward}", "samples_per_prompt=3", "mini_batch=9", "rollout_batch=6"),
    # some groups have two equal responses
    "model": ("samples_per_prompt=2", "mini_batch=7", "rollout_batch=7", "generation.temperature=0.1"),
}


def scattered(workload, cluster) -> Placement:
    """Returns every call of a round on other ranks, so that groups are split between them in different ways."""
    ranks = cluster.ranks
    layouts = {call.name: Layout.data_parallel(ranks) for call in workload.workflow.placed_calls}
    layouts |= {"actor_generate": Layout.data_parallel(ranks[1:]), "reward_infer": Layout.data_parallel(ranks[::-2])}
    return Placement(layouts, ("reward_infer",))


PLACEMENTS = {
    "flattening": flattening.place,
    "zero 3": partial(flattening.place, zero=3),
    "interleaving1": interleaving1.place,
    "interleaving2": interleaving2.place,
    "separation": separation.place,
    "separation in stages": partial(separation.place, generation_pp=2),
    "reallocation": partial(reallocation.place, generation_tp=2, training_tp=1),
    "scattered": scattered,
}
IN_PLAIN = ("separation", "function"), ("scattered", "model")


@pytest.fixture(scope="module")
def folder(written):
    def write(folder) -> None:
        write_all(folder, eos_token_ids=(1, 2, 3, 4))
        (folder / "reward.py").write_text(REWARD, encoding="utf-8")

    return written(write)


def config_of(folder, name: str):
    models = [f"models.actor={folder / 'actor'}", f"data.prompts={folder / 'prompts.jsonl'}"]
    judge = f"models.reward={folder / 'reward'}" if name == "model" else f"reward_function={folder / 'reward.py'}:few"
    sizes = ["data.max_prompt=8", "generation.max_new_tokens=10", "micro_batch=3", "iterations=3"]
    own = ["grpo.rounds=3", "grpo.drop_equal_groups=true", "grpo.kl_coef=0.05", "optimizer.actor_lr=1e-3"]
    words = [*models, judge, *sizes, *own, *CONFIGS[name]]
    return presets.load("tiny", [word for word in words if word != "{reward}"], algorithm="grpo")


@pytest.fixture(scope="module")
def alone(folder, made_once):
    def make(name, path):
        run = RunOf(config_of(folder, name))
        history = run.iterations()
        save_run(path, [row | {"prompts_used": run.state.prompts_used} for row in history], weights_of(run))

    runs = made_once(sorted(CONFIGS), make)
    return {name: load_run(runs / name) for name in CONFIGS}


@pytest.mark.parametrize(
    ("placement", "name"),
    [
        pytest.param(
            placement, name, marks=[pytest.mark.slow_at(2)] if (placement, name) in IN_PLAIN else pytest.mark.slow
        )
        for placement in PLACEMENTS
        for name in CONFIGS
    ],
)
def test_equals_the_run_on_one_rank(placement, name, world, folder, alone, make_group):
    config = config_of(folder, name)
    try:
        program = compiled(config, world.size, PLACEMENTS[placement])
    except UserError:
        pytest.skip("not on so many ranks")
    assert errors(program) == []
    run = RunOf(config, with_groups(world, program, make_group), program)
    history = run.iterations()
    expected, weights = alone[name]
    of_run = [{key: value for key, value in row.items() if key != "prompts_used"} for row in expected]
    # logits of a model are divided by the temperature
    compare_metrics(history, of_run, 10 * TOLERANCE if name == "model" else TOLERANCE)
    assert max(mine["failed_groups"] for mine in history) > 0
    assert run.state.prompts_used == expected[-1]["prompts_used"] > 3 * config.rollout_batch
    for weight_name, weight in weights_of(run).items():
        assert (weight - weights[weight_name]).abs().max() <= 2e-5, weight_name
