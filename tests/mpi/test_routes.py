"""A mixture of experts on two ranks: tokens of one rank, and routes that training takes from generation.

python tests/run_mpi.py 2 -- tests/mpi/test_routes.py
"""

import json
from pathlib import Path

import pytest

from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.strategies import interleaving1, separation
from tests.folders import write_all
from tests.mpi.test_ahead import Ahead, Twin, halves
from tests.mpi.test_invariance import EOS_IDS, TOLERANCE, by_call, error, with_groups
from tests.programs import errors
from tests.runs import RunOf, compiled, load

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.ranks(2),
    pytest.mark.usefixtures("cheap_garbage_collection"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]

MIXTURE = {"model_type": "qwen3_moe", "qk_norm": True, "num_layers": 3, "num_dense_layers": 1, "norm_topk": True}
MIXTURE |= {"num_experts": 4, "experts_per_token": 2, "expert_size": 12}
PAIR = {"dp": Layout.grid_of(range(2)), "tp": Layout.grid_of(range(2), tp=2), "pp": Layout.grid_of(range(2), pp=2)}


def actor_in(**layouts: str):
    """Returns a placement of the actor's calls in these layouts; all else is data-parallel."""
    return lambda workload, cluster: by_call(
        workload, PAIR["dp"], **{f"actor_{kind}": PAIR[name] for kind, name in layouts.items()}
    )


PLACEMENTS = {
    "data": actor_in(),
    "slices": actor_in(generate="tp", infer="tp", train="tp"),
    "stages": actor_in(generate="pp", infer="pp", train="pp"),
    "stages train": actor_in(infer="dp", train="pp"),
    "interleaving": interleaving1.place,
    "separation": separation.place,
}
CONFIGS = {
    "plain": [],
    "recompute": ["ppo.old_logprobs=recompute", "generation.top_k=15"],
    "router": ["experts.replay=false"],
    "losses": ["experts.balance_coef=0.5", "experts.z_coef=0.1", "micro_batch=3"],
}
CASES = [("data", "plain"), ("stages train", "plain"), ("stages", "recompute"), ("separation", "recompute")]
CASES += [("data", "router"), ("data", "losses"), ("slices", "losses")]
MORE = [*((name, "plain") for name in ("slices", "stages", "interleaving", "separation")), ("stages", "losses")]


@pytest.fixture(scope="module")
def folder(written, shared_folder):
    written(write_all, eos_token_ids=EOS_IDS, **MIXTURE)
    return shared_folder


def settings_of(folder: Path, config: str):
    words = [f"models.actor={folder / 'actor'}", f"models.reward={folder / 'reward'}", "data.max_prompt=8"]
    words += [f"data.prompts={folder / 'prompts.jsonl'}", "generation.max_new_tokens=10", "iterations=2"]
    words += ["rollout_batch=12", "mini_batch=6", "micro_batch=2", "ppo.epochs=2", "optimizer.actor_lr=1e-3"]
    return load([*words, *CONFIGS[config]])


@pytest.fixture(scope="module")
def alone(folder, made_once) -> dict[str, list[dict]]:
    """Returns, by config, the metrics of the run on one rank."""

    def make(name: str, path: Path) -> None:
        path.write_text(json.dumps(RunOf(settings_of(folder, name)).iterations()), encoding="utf-8")

    runs = made_once([*CONFIGS], make)
    return {name: json.loads((runs / name).read_text(encoding="utf-8")) for name in CONFIGS}


@pytest.mark.parametrize(
    ("placement", "config"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_a_mixture_equals_the_run_on_one_rank(placement, config, world, folder, alone, make_group):
    settings = settings_of(folder, config)
    program = compiled(settings, world.size, PLACEMENTS[placement])
    assert errors(program) == []
    run = RunOf(settings, with_groups(world, program, make_group), program)
    history, replays = run.iterations(), config != "router"
    assert [m["tokens_sha256"] for m in history] == [m["tokens_sha256"] for m in alone[config]]
    for metrics, expected in zip(history, alone[config], strict=True):
        assert metrics["parity_max_abs"] < 1e-4
        assert metrics.get("route_disagreement") == (0.0 if replays else None)
        losses = ("router_balance", "router_z", "router_entropy") if config == "losses" else ()
        for name in ("policy_loss", "actor_grad_norm", "kl", "value_loss", *losses):
            assert error(metrics[name], expected[name]) <= TOLERANCE, (name, metrics[name], expected[name])
        assert metrics["moved_bytes"] == sum(transfer.num_bytes for transfer in program.transfers)
    assert ("responses.routes" in program.workload.workflow.shapes) == replays


def test_a_batch_that_is_drawn_ahead_trains_with_its_routes(world, folder, made_once, make_group):
    """The gate is a pass of the weights that drew, which takes the routes, too."""
    settings = settings_of(folder, "plain")
    twin = made_once(["ahead"], lambda _, path: path.write_text(json.dumps(Twin(settings).iterations())))
    program = compiled(settings, world.size, halves)
    history = Ahead(settings, with_groups(world, program, make_group), program).iterations()
    expected = json.loads((twin / "ahead").read_text())
    assert [one["tokens_sha256"] for one in history] == [one["tokens_sha256"] for one in expected]
    assert [one["route_disagreement"] for one in history] == [0.0] * len(history)
    assert max(one["parity_max_abs"] for one in history) < 1e-4
