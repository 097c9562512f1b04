"""PPO with adapters of actor and critic: tokens and adapters of every placement are those of one rank; exact resume.

python tests/run_mpi.py 2 4 -- tests/mpi/test_adapted_runs.py
"""

import pytest
import torch

from rlhf_spmd.config import options as configs
from rlhf_spmd.model.linear import sum_bytes
from rlhf_spmd.plan.adapters import is_factor
from rlhf_spmd.plan.cost.memory import working_bytes
from rlhf_spmd.plan.program.tensors import trained_weights_of
from rlhf_spmd.runtime.run.recorded import base_sums
from rlhf_spmd.runtime.weights.weight_mover import Mover
from tests.mpi.test_invariance import TOLERANCE, compare_metrics, load_run, save_run
from tests.mpi.test_restore import Runs, folder, stored_numbers, weights_of  # noqa: F401 (folder is a fixture)
from tests.programs import errors
from tests.runs import OneRank, RunOf, compiled

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.ranks(2, 4),
    pytest.mark.slow_at(2),
    pytest.mark.usefixtures("cheap_garbage_collection"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]
LORA = ("lora.rank=4", "lora.alpha=8", "ppo.epochs=1", "iterations=2")
PLACEMENTS = {2: ("flattening", "separation"), 4: ("zero 1", "separation", "reallocation")}


def bases_of(run: RunOf) -> dict[str, torch.Tensor]:
    """Returns the frozen weights of the models on this rank."""
    models = [(name, engine.model) for name, engine in run.job.models.engines.items()]
    models += [(f"{name} {shard}", copy) for (name, shard), copy in run.job.models.copies.items()]
    return {
        f"{where} {name}": one
        for where, model in models
        for name, one in model.state_dict().items()
        if not is_factor(name) and (model.adapters is None or name != "score.weight")
    }


JOINED = "lora.generate=joined"


def made_alone(world, folder, *words):  # noqa: F811
    """Runs on one rank, the first."""
    path, sums = folder / "-".join(("alone", *words)).replace("/", "-"), None
    if world.rank == 0:
        settings = configs.overridden(Runs(world, folder, None).settings, [*LORA, *words])
        run = RunOf(settings, OneRank(), compiled(settings))
        history = run.iterations()
        save_run(path, history, {name: weight.clone() for name, weight in weights_of(run).items()})
        sums = base_sums(run.job)
    sums = world.bcast(sums, what="the run on one rank")
    return *load_run(path), sums


@pytest.fixture(scope="module")
def alone(world, folder):  # noqa: F811
    return made_alone(world, folder)


@pytest.fixture(scope="module")
def alone_on_one_base(world, folder):  # noqa: F811
    return made_alone(world, folder, f"models.critic={folder / 'actor'}")


def compare(run: RunOf, alone, monkeypatch) -> None:
    """Runs a run and compares it with the one on one rank."""
    assert errors(run.program) == []
    world, movers, real = run.job.world, [], Mover.finish
    before = {name: one.clone() for name, one in bases_of(run).items()}
    monkeypatch.setattr(Mover, "finish", lambda self: (real(self), movers.append(self)))
    history, (expected, adapters, sums) = run.iterations(), alone
    sent = sum(world.allgather(sum(mover.num_bytes_sent for mover in movers), "the bytes sent"))
    moves = [one for one in run.program.transfers if one.reallocation is not None]
    assert sent == sum(transfer.num_bytes for transfer in moves) * run.config.iterations
    assert base_sums(run.job) == sums and len(sums) == 2
    compare_metrics(history, expected)
    for name, one in weights_of(run).items():
        assert is_factor(name) or name == "critic.score.weight"
        torch.testing.assert_close(one, adapters[name], rtol=TOLERANCE, atol=TOLERANCE)
    assert all(torch.equal(before[name], one) for name, one in bases_of(run).items())
    for transfer in moves:  # adapters alone, in float32
        names = {piece.weight for route in transfer.reallocation.routes for piece in route.pieces}
        assert names <= {weight.name for weight in trained_weights_of(run.program.workload.models[transfer.model])}
        assert transfer.reallocation.bytes_per_number == 4


@pytest.mark.parametrize("number", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_tokens_and_adapters_of_one_rank(number, world, folder, alone, make_group, monkeypatch):  # noqa: F811
    if number >= len(PLACEMENTS[world.size]):
        pytest.skip("no more placements at this number of ranks")
    compare(Runs(world, folder, make_group, *LORA).make(PLACEMENTS[world.size][number]), alone, monkeypatch)


@pytest.fixture(scope="module")
def alone_joined(world, folder, alone):  # noqa: F811
    found = made_alone(world, folder, JOINED)
    (mine, *_), (theirs, *_) = found, alone
    assert [one["tokens_sha256"] for one in mine] == [one["tokens_sha256"] for one in theirs]
    return found


@pytest.mark.parametrize(
    ("ranks", "placement"),
    [
        (4, "reallocation"),
        *(pytest.param(2, one, marks=pytest.mark.slow) for one in ("flattening", "separation")),
        *(
            pytest.param(4, one, marks=pytest.mark.slow)
            for one in ("interleaving1", "separation", "three stages", "zero 1")
        ),
    ],
)
def test_joined_copies_draw_the_same_tokens(ranks, placement, world, folder, alone_joined, make_group, monkeypatch):  # noqa: F811
    if ranks != world.size:
        pytest.skip(f"at {ranks} ranks")
    run = Runs(world, folder, make_group, *LORA, JOINED).make(placement)
    copied = [
        sum_bytes(run.job.models.model(call))
        for call in run.program.workload.workflow.generate_calls
        if world.rank in run.program.placement.layouts[call.name].ranks
    ]
    assert working_bytes(run.program, world.rank)["copies with adapters"] == sum(copied)
    compare(run, alone_joined, monkeypatch)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "placement",
    [
        "reallocation",
        *(
            pytest.param(placement, marks=pytest.mark.slow)
            for placement in ("flattening", "interleaving1", "separation zero 1", "three stages", "last")
        ),
    ],
)
def test_a_critic_on_the_base_of_the_actor(placement, world, folder, alone_on_one_base, make_group, monkeypatch):  # noqa: F811
    """With tied embeddings, whose copy on the last stage the critic does not have."""
    run = Runs(world, folder, make_group, *LORA, f"models.critic={folder / 'actor'}").make(placement)
    assert dict(run.program.workload.bases) == dict.fromkeys(("actor", "critic", "reference"), "actor")
    engines = {name: dict(engine.model.named_parameters()) for name, engine in run.job.models.engines.items()}
    layouts = run.program.placement.layouts
    if len(engines) == 2 and len({layouts[f"{name}_train"].shard(world.rank) for name in engines}) == 1:
        names = (engines["actor"].keys() & engines["critic"].keys()) - {"score.weight"}
        assert all(
            engines["actor"][name].data_ptr() == engines["critic"][name].data_ptr()
            for name in names
            if not is_factor(name)
        )
    compare(run, alone_on_one_base, monkeypatch)


@pytest.mark.parametrize(
    ("before", "after"), [("zero 1", "zero 1"), pytest.param("reallocation", "one", marks=pytest.mark.slow)]
)
@pytest.mark.ranks(4)
def test_resume(before, after, world, folder, make_group):  # noqa: F811
    """Every bit in the same layout; the same tokens in another one. The checkpoint holds adapters alone."""
    runs = Runs(world, folder, make_group, *LORA)
    undisturbed = runs.make(before)
    undisturbed.iteration()
    runs.save(undisturbed)
    shapes = undisturbed.program.workload.models
    numbers = sum(
        w.layers * w.rows * w.columns for model in ("actor", "critic") for w in trained_weights_of(shapes[model])
    )
    assert stored_numbers(folder) == 3 * numbers
    theirs = undisturbed.iteration()
    resumed = runs.resumed(after)
    mine = resumed.iteration()
    assert mine["tokens_sha256"] == theirs["tokens_sha256"]
    found, wanted = weights_of(resumed), weights_of(undisturbed)
    for name in found.keys() & wanted.keys():
        limit = 0.0 if before == after else TOLERANCE
        torch.testing.assert_close(found[name], wanted[name], rtol=limit, atol=limit)
