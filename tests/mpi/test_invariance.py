"""Numbers do not depend on the placement: every placement on N ranks against a run of the same config on one rank.

    python tests/run_mpi.py 2 4 5 8 -- tests/mpi/test_invariance.py

Identical tokens in every iteration; metrics and the final weights of actor and critic equal up to the order of sums.
Each one-rank run is made once, by one of the ranks, while the others make others.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.workload import Workload
from rlhf_spmd.runtime.world.groups import connect_pairs
from rlhf_spmd.strategies import _template, flattening, interleaving1, interleaving2, separation
from tests.folders import write_all
from tests.programs import errors
from tests.runs import RunOf, compiled, load

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.usefixtures("cheap_garbage_collection"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]

TOLERANCE = 1e-5  # times max(1, |value|)
NOT_COMPARED = ("generate_s", "gen_tokens_per_s", "parity_max_abs", "parity_mean_abs", "moved_bytes", "moved_messages")
EOS_IDS = tuple(range(1, 6))

# No number of ranks divides 7; 3 is less than most of them, so that some ranks have no row of any mini-batch.
CONFIGS = {
    "plain": ["ppo.epochs=2"],
    "7 rows": [
        "rollout_batch=21",
        "mini_batch=7",
        "ppo.old_logprobs=recompute",
        "ppo.truncation=bootstrap",
        "ppo.whiten=batch",
        "ppo.kl_controller=adaptive",
        "ppo.normalize_scores=true",
        "generation.temperature=0.8",
    ],
    "7 streamed": [  # the same, but for whitening over the batch, which turns streaming off
        "rollout_batch=21",
        "mini_batch=7",
        "ppo.old_logprobs=recompute",
        "ppo.truncation=bootstrap",
        "ppo.kl_controller=adaptive",
        "ppo.normalize_scores=true",
        "generation.temperature=0.8",
    ],
    "3 rows": [
        "rollout_batch=9",
        "mini_batch=3",
        "generation.top_k=15",
        "generation.min_new_tokens=2",
        "ppo.kl_early_stop=0.003",
        "optimizer.max_grad_norm=0.5",
    ],
}


# ---- Placements ---------------------------------------------------------------------------------------------------


def by_call(workload: Workload, default: Layout, **layouts: Layout) -> Placement:
    """Returns one layout for all calls but those named."""
    return Placement({call.name: layouts.get(call.name, default) for call in workload.workflow.placed_calls})


def zero(stage: int) -> Callable:
    return lambda workload, cluster: flattening.place(workload, cluster, zero=stage)


def apart(workload: Workload, cluster: Cluster, *, stage: int = 0) -> Placement:
    """Returns training on the first ranks; generation and inference, with shadows of actor and critic, on the last."""
    half = cluster.num_devices // 2
    training = Layout.data_parallel(cluster.ranks[:half], zero=stage)
    rest = Layout.data_parallel(cluster.ranks[half:])
    return by_call(workload, rest, actor_train=training, critic_train=training)


def reference_on_one(workload: Workload, cluster: Cluster) -> Placement:
    """Returns all on all ranks, but the reference on the last alone."""
    alone = Layout.data_parallel(cluster.ranks[-1:])
    return by_call(workload, Layout.data_parallel(cluster.ranks), reference_infer=alone)


def trained_on_halves(workload: Workload, cluster: Cluster) -> Placement:
    """Places the actor's training on the first half, the critic's on the second; all else everywhere."""
    half = cluster.num_devices // 2
    return by_call(
        workload,
        Layout.data_parallel(cluster.ranks),
        actor_train=Layout.data_parallel(cluster.ranks[:half]),
        critic_train=Layout.data_parallel(cluster.ranks[half:]),
    )


def scattered(workload: Workload, cluster: Cluster) -> Placement:
    """Returns every call on other ranks, with other micro-batches; some ranks train both models, on other columns."""
    ranks = cluster.ranks
    return by_call(
        workload,
        Layout.data_parallel(ranks[::2], micro_batch=3),
        actor_generate=Layout.data_parallel(ranks[1:]),
        critic_infer=Layout.data_parallel((ranks[0], ranks[-1]), micro_batch=1),
        reward_infer=Layout.data_parallel(ranks[1::2]),
        actor_train=Layout.data_parallel(ranks, micro_batch=5),
        critic_train=Layout.data_parallel(ranks[1:], zero=2),
    )


def with_a_hole(workload: Workload, cluster: Cluster) -> Placement:
    """Places calls so that a rank holds columns in the middle when it needs those on both sides: two messages of one
    pair at once."""
    ranks = cluster.ranks
    return by_call(
        workload,
        Layout.data_parallel(ranks),
        actor_generate=Layout.data_parallel(ranks[:1]),
        reference_infer=Layout.data_parallel(ranks[1:]),
        reward_infer=Layout.data_parallel(ranks[len(ranks) // 2 :][:1]),
    )


PLACEMENTS = {
    "flattening": flattening.place,
    "zero 1": zero(1),
    "zero 2": zero(2),
    "zero 3": zero(3),
    "template": _template.place,
    "template zero 2": lambda workload, cluster: _template.place(workload, cluster, zero=2),
    "apart": apart,
    "apart zero 1": lambda workload, cluster: apart(workload, cluster, stage=1),
    "interleaving1": interleaving1.place,
    "interleaving2": interleaving2.place,
    "interleaving1 uneven": lambda workload, cluster: interleaving1.place(
        workload, cluster, ratios=("critic=1/2", "reference=1/4", "reward=1/4") if cluster.num_devices > 3 else ()
    ),
    "interleaving2 zero 2": lambda workload, cluster: interleaving2.place(workload, cluster, zero=2),
    "interleaving1 zero 2": lambda workload, cluster: interleaving1.place(workload, cluster, zero=2),
    "interleaving2 zero 3": lambda workload, cluster: interleaving2.place(workload, cluster, zero=3),
    "interleaving1 1 to 3": lambda workload, cluster: interleaving1.place(
        workload, cluster, ratios=("reference=1/4", "reward=3/4") if cluster.num_devices > 3 else ()
    ),
    "separation": separation.place,
    "separation 1": lambda workload, cluster: separation.place(
        workload, cluster, generation_ranks=1, in_flight=1, decode_mini_batches=1
    ),
    "separation zero 2": lambda workload, cluster: separation.place(
        workload, cluster, zero=2, in_flight=4, decode_mini_batches=4
    ),
    "reference on one": reference_on_one,
    "trained on halves": trained_on_halves,
    "scattered": scattered,
    "with a hole": with_a_hole,
}
ROWS = ("7 rows", "3 rows")
CASES = [("flattening", config, seed) for config, seed in (("plain", 1), ("7 rows", 3), ("3 rows", 2))]
for number, name in enumerate(PLACEMENTS):  # two configs and two seeds for each
    CASES += [(name, "plain", number % 2), (name, ROWS[number % 2], 2 + number // 2 % 2)]
CASES += [(name, "7 streamed", 4) for name in ("separation", "separation 1", "separation zero 2")]
CASES += [(name, "3 rows", 2) for name in ("separation", "separation zero 2") if (name, "3 rows", 2) not in CASES]
# The others run in `make test` with a number of rows that no ranks divide, which finds what equal shares find, too.
IN_PLAIN = ("flattening", "separation")
MORE = [("separation", "7 streamed", 4), ("separation zero 2", "7 streamed", 4), ("separation", "3 rows", 2)]
MORE += [case for case in CASES if case[0] in ("interleaving1 1 to 3", "template zero 2", "interleaving2 zero 2")]


# ---- One rank -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(written, shared_folder):
    """Returns checkpoints and prompts."""
    written(write_all, eos_token_ids=EOS_IDS)
    return shared_folder


def overrides_of(folder: Path, config: str, seed: int) -> list[str]:
    return [
        f"models.actor={folder / 'actor'}",
        f"models.reward={folder / 'reward'}",
        f"data.prompts={folder / 'prompts.jsonl'}",
        "data.max_prompt=8",
        "generation.max_new_tokens=6",
        "iterations=2",  # a third carries no state that the second does not
        "rollout_batch=24",
        "mini_batch=12",
        "micro_batch=4",
        "optimizer.actor_lr=1e-3",
        "optimizer.critic_lr=1e-3",
        f"seed={seed}",
        *CONFIGS[config],
    ]


@pytest.fixture(scope="module")
def alone(folder, made_once) -> dict[tuple[str, int], tuple[list[dict], dict[str, Tensor]]]:
    """Returns, by (config, seed), metrics and weights of the run on one rank."""
    wanted = {f"{config} {seed}": (config, seed) for _, config, seed in CASES}

    def make(name: str, path: Path) -> None:
        run = RunOf(load(overrides_of(folder, *wanted[name])))
        save_run(path, run.iterations(), weights_of(run))

    runs = made_once(sorted(wanted), make)
    return {key: load_run(runs / name) for name, key in wanted.items()}


def save_run(path: Path, metrics: list[dict], weights: dict[str, Tensor]) -> None:
    """Saves metrics and weights as one file."""
    save_file(weights, path, metadata={"metrics": json.dumps(metrics)})


def load_run(path: Path) -> tuple[list[dict], dict[str, Tensor]]:
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["metrics"]), load_file(path)


def weights_of(run: RunOf) -> dict[str, Tensor]:
    """Returns weights of actor and critic as far as this rank trains them."""
    return {f"{model}.{name}": w for model in ("actor", "critic") for name, w in run.weights(model).items()}


# ---- The comparison -----------------------------------------------------------------------------------------------


def with_groups(world, program: Program, make_group: Callable):
    """Returns the same world with the groups of one program, and its pairs connected. Every rank makes every group."""
    placed = copy.copy(world)
    placed._groups = {name: make_group(ranks, name.split()[0]) for name, ranks in program.groups.items()}
    connect_pairs(placed._groups, program.pairs, world.device)
    return placed


def error(value, expected) -> float:
    return abs(value - expected) / max(1.0, abs(expected))


def compare_metrics(history: list[dict], expected: list[dict], limit: float = TOLERANCE) -> float:
    """Checks that metrics are those of another run, as far as they do not depend on the placement. Returns the largest
    difference."""
    worst = 0.0
    assert len(history) == len(expected)
    for mine, theirs in zip(history, expected, strict=True):
        assert mine.keys() == theirs.keys() and mine.get("tokens_sha256") == theirs.get("tokens_sha256")
        for name in mine.keys() - {"tokens_sha256", *NOT_COMPARED}:
            worst = max(worst, error(mine[name], theirs[name]))
            assert worst <= limit, (name, mine[name], theirs[name])
    return worst


def weight_error(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Returns the largest difference of weights from those of another run, which may have more of them."""
    pairs = ((weight, expected[name]) for name, weight in weights.items())
    return max((float(((one - other).abs() / other.abs().clamp(min=1.0)).max()) for one, other in pairs), default=0.0)


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("placement", "config", "seed"),
    [
        pytest.param(
            *case,
            id="-".join(map(str, case)),
            marks=[pytest.mark.slow] if case[1] == "plain" and case[0] not in IN_PLAIN or case in MORE else [],
        )
        for case in CASES
    ],
)
def test_equals_the_run_on_one_rank(placement, config, seed, world, folder, alone, make_group):
    settings = load(overrides_of(folder, config, seed))
    program = compiled(settings, world.size, PLACEMENTS[placement])
    assert errors(program) == []
    run = RunOf(settings, with_groups(world, program, make_group), program)
    history = run.iterations()
    expected_history, expected_weights = alone[config, seed]

    worst_metric = compare_metrics(history, expected_history)
    worst_weight = weight_error(weights_of(run), expected_weights)
    assert worst_weight <= TOLERANCE
    compare_shadows(run, expected_weights)
    for metrics in history:
        assert metrics["parity_max_abs"] < 1e-4
        assert metrics["moved_bytes"] == sum(transfer.num_bytes for transfer in program.transfers)
        assert metrics["moved_messages"] == sum(transfer.num_messages for transfer in program.transfers)
    worst = world.allgather([worst_metric, worst_weight], "differences")
    if world.rank == 0:
        numbers = [max(column) for column in zip(*worst, strict=True)]
        print(f"N {world.size} {placement}, {config}, seed {seed}: metrics {numbers[0]:.1e}, weights {numbers[1]:.1e}")


def test_weights_travel_in_many_buckets(world, folder, alone, make_group, monkeypatch):
    monkeypatch.setattr("rlhf_spmd.plan.program.transfers.BUCKET_BYTES", 1000)
    monkeypatch.setattr("rlhf_spmd.runtime.weights.weight_sync.BUCKET_BYTES", 1000)
    settings = load(overrides_of(folder, "plain", 0))
    program = compiled(settings, world.size, separation.place)
    assert max(transfer.num_messages for transfer in program.transfers if transfer.model) > 50
    run = RunOf(settings, with_groups(world, program, make_group), program)
    history = run.iterations()
    assert [m["tokens_sha256"] for m in history] == [m["tokens_sha256"] for m in alone["plain", 0][0]]
    assert history[-1]["moved_messages"] == sum(transfer.num_messages for transfer in program.transfers)
    compare_shadows(run, alone["plain", 0][1])


def compare_shadows(run: RunOf, expected_weights: dict[str, Tensor]) -> None:
    """Checks that a copy of a model that trains elsewhere holds its newest weights."""
    for (model, _), held in run.job.models.copies.items():
        if model in ("actor", "critic"):
            held_weights = {f"{model}.{name}": weight for name, weight in held.state_dict().items()}
            assert weight_error(held_weights, expected_weights) <= TOLERANCE, model


@pytest.mark.ranks(4)
def test_every_model_did_learn(alone, folder, world):
    """The comparison would be idle if nothing changed."""
    for (config, seed), (metrics, weights) in list(alone.items())[world.rank :: world.size]:
        start = weights_of(RunOf(load(overrides_of(folder, config, seed))))
        assert all(float((weights[name] - start[name]).abs().max()) > 1e-4 for name in weights), (config, seed)
        assert len({m["tokens_sha256"] for m in metrics}) == len(metrics)
        assert any(0 < m["ended_fraction"] < 1 for m in metrics)
