"""What interleaving saves, on real allocations: every tensor of this process is counted, before and after loading.

APP's claim (arXiv 2312.11819): reference and reward, replicated, take half of flattening's bytes. Sharded by ZeRO 3
they take the same bytes, but half as many ranks gather them.
"""

import gc
import tempfile
from pathlib import Path

import pytest
import torch

from rlhf_spmd.plan.memory import static_bytes
from rlhf_spmd.plan.program import Run
from rlhf_spmd.strategies import flattening, interleaving1, interleaving2
from tests.folders import write_all
from tests.mpi.test_invariance import with_groups
from tests.runs import RunOf, compiled, load

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]
FROZEN = ("reference", "reward")


def tensor_bytes() -> int:
    """Bytes of all storages that some tensor of this process holds."""
    gc.collect()
    # type() and not isinstance(), which asks lazy modules for their class and so imports them
    storages = [t.untyped_storage() for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


@pytest.fixture(scope="module")
def settings(world):
    with tempfile.TemporaryDirectory(prefix="memory_") as name:
        folder = Path(world.bcast(name, what="the folder"))
        if world.rank == 0:
            overrides = write_all(folder)
            (folder / "overrides").write_text("\n".join(overrides))
        world.barrier("the checkpoints")
        yield load((folder / "overrides").read_text().split("\n"))
        world.barrier("the end of the folder")


def measured(place, settings, world, make_group, **options) -> tuple[int, RunOf]:
    """Bytes that the models of a run take on this rank."""
    program = compiled(settings, world.size, place, **options)
    before = tensor_bytes()
    run = RunOf(settings, with_groups(world, program, make_group), program)
    return tensor_bytes() - before, run


def frozen_weights(run: RunOf) -> list[torch.Tensor]:
    copies = run.job.models.copies
    return [p for name in FROZEN if name in copies for p in copies[name].parameters()]


STRATEGIES = pytest.mark.parametrize("strategy", [interleaving1, interleaving2], ids=["interleaving1", "interleaving2"])


@STRATEGIES
def test_replicated_reference_and_reward_take_half(strategy, settings, world, make_group):
    flat, run = measured(flattening.place, settings, world, make_group)
    copies = run.job.models.copies
    sizes = {name: sum(p.nbytes for p in copies[name].parameters()) for name in FROZEN}
    del run, copies
    halved, run = measured(strategy.place, settings, world, make_group)
    mine = [name for name in FROZEN if name in run.job.models.copies]
    assert len(mine) == 1  # each rank has one of the two
    saved = sum(sizes.values()) - sizes[mine[0]]
    assert abs(flat - halved - saved) <= 0.02 * saved
    total = sum(world.allgather(flat - halved, "the bytes"))
    if world.size % 2 == 0:  # equal halves: what all ranks save together is half of what they had
        assert abs(total - world.size * sum(sizes.values()) / 2) <= 0.02 * total
    forecast = static_bytes(run.program, world.rank)["weights"]
    trained = [p for engine in run.job.models.engines.values() for p in engine.model.parameters()]
    held = sum(p.nbytes for p in (*frozen_weights(run), *trained))
    assert abs(held - forecast) <= 0.02 * forecast


@STRATEGIES
def test_sharded_they_take_the_same_bytes_in_smaller_groups(
    strategy, settings, world, make_group, cheap_garbage_collection
):
    if world.size == 2:
        pytest.skip("a half of two ranks has nothing to shard")
    held, sizes = [], []
    for place in (flattening.place, strategy.place):
        program = compiled(settings, world.size, place, zero=3)
        run = RunOf(settings, with_groups(world, program, make_group), program)
        models = run.job.models
        assert sum(p.numel() for p in frozen_weights(run)) == 0
        shards = [sharded.shard.nbytes for sharded in models.sharded.values()]
        held.append(sum(world.allgather(sum(shards), "the shards")))
        runs = [step for step in program.instructions[world.rank] if isinstance(step, Run)]
        names = {step.group for step in runs if step.call in ("reference_infer", "reward_infer")}
        sizes.append({len(program.groups[name]) for name in names})
        with models.weights(next(iter(models.sharded))) as model:
            assert all(p.numel() for p in model.parameters())
        run.iteration()
        assert sum(p.numel() for p in frozen_weights(run)) == 0  # what was gathered is free again
    assert abs(held[1] - held[0]) <= 0.01 * held[0]  # but for padding
    assert sizes[0] == {world.size} and sizes[1] <= {world.size // 2, -(-world.size // 2)}
