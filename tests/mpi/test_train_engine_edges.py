"""What a train engine does beside training: full weights on demand, gradients of zero and infinity, what it refuses and
what it leaves alone.

    python tests/run_mpi.py 4 --limit 300 -- tests/mpi/test_train_engine_edges.py

Runs at 2 to 8 ranks; cases that do not fit are skipped.
"""

import os

import pytest
import torch
import torch.distributed as dist

from rlhf_spmd.runtime.engines import deepspeed_engine
from rlhf_spmd.runtime.engines.adamw import EngineOptions
from rlhf_spmd.runtime.engines.flat_engine import Groups
from rlhf_spmd.runtime.engines.train_engine import make_engine
from tests.steps import engine_step
from tests.trainee import CLIP, LR, Trainee, global_batch, share_of_loss, shares, single_process, tiny, whole_weights

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.usefixtures("cheap_garbage_collection"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]


# --- ZeRO 3: full weights on demand -------------------------------------------------------------------------


@pytest.mark.rotates
@pytest.mark.parametrize("group", ["all", "odd", "last"])
def test_zero3_gathers_for_inference_and_shards_again(job, group):
    trainee = Trainee(job, group, 3, clip=CLIP)
    expected = tiny()
    tokens = global_batch(7).tokens_BT
    for step in range(3):
        if trainee.inside:
            engine = trainee.engine
            weights = list(engine.model.parameters())
            total = sum(p.ds_numel for p in weights)
            held = sum(p.ds_tensor.numel() + p.numel() for p in weights)
            assert total / len(trainee.ranks) <= held < total / len(trainee.ranks) + len(trainee.ranks) * len(weights)
            with engine.gathered(), torch.no_grad():
                for _ in range(1 + trainee.rank):  # each rank as often as it likes
                    logits = engine.model.logits(engine.model(tokens))
            torch.testing.assert_close(logits, expected.logits(expected(tokens)), rtol=1e-5, atol=1e-5)
            assert all(p.numel() == 0 for p in weights)
        trainee.step(step)
        expected.load_state_dict(single_process(step + 1, clip=CLIP).state)
    trainee.check(single_process(3, clip=CLIP))


def test_gathering_beside_computation_changes_no_bit(job, monkeypatch):
    """As on a GPU. On a CPU DeepSpeed has no streams, so this tells what it does in which order, not when."""
    found, config = [], deepspeed_engine._config
    for overlaps in (False, True):

        def of_gpu(weights, options, overlaps=overlaps):
            made = config(weights, options)
            return made | {"zero_optimization": made["zero_optimization"] | {"overlap_comm": overlaps}}

        monkeypatch.setattr(deepspeed_engine, "_config", of_gpu)
        trainee = Trainee(job, "all", 3, clip=CLIP, num_micro=2)
        for step in range(3):
            trainee.step(step)
        found.append(whole_weights(trainee.engine))
    assert all(torch.equal(found[0][name], one) for name, one in found[1].items()) and len(found[0]) == len(found[1])


def test_gathered_shards_again_after_an_error(job):
    trainee = Trainee(job, "all", 3, clip=CLIP)
    with pytest.raises(ZeroDivisionError), trainee.engine.gathered():
        1 / 0  # noqa: B018
    for step in range(2):
        trainee.step(step)
    trainee.check(single_process(2, clip=CLIP))


# --- Edges --------------------------------------------------------------------------------------------------


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_and_infinite_gradients(job, zero, dtype):
    """No gradient: no change, norm 0. One that is not finite on one rank: no change anywhere, and the norm says so."""
    trainee = Trainee(job, "all", zero, clip=CLIP, dtype=dtype)
    trainee.step(0)
    engine = trainee.engine
    before = whole_weights(engine)
    batches = shares(global_batch(1), size=len(trainee.ranks), rank=trainee.rank, num_micro=1)
    grad_norm = engine_step(engine, batches, lambda model, batch: share_of_loss(model, batch) * 0.0, lr=0.0)
    assert grad_norm == 0
    factor = torch.inf if trainee.rank == 0 else 1.0
    grad_norm = engine_step(engine, batches, lambda model, batch: share_of_loss(model, batch) * factor, lr=LR)
    assert not torch.isfinite(torch.tensor(grad_norm))
    for name, weight in whole_weights(engine).items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=0)
    trainee.step(2)
    assert torch.isfinite(torch.tensor(trainee.run.norms[-1]))


def test_a_rank_may_return_a_constant_at_stage_0(job):
    rank = job.world.rank
    engine = make_engine(
        tiny(), groups=Groups(data=job.groups("all")[0]), options=EngineOptions(zero=0, max_grad_norm=CLIP)
    )
    for step in range(2):
        batch = global_batch(step)
        engine_step(engine, [batch], lambda m, b: share_of_loss(m, b) if rank == 0 else torch.zeros(()), lr=LR)
    expected = single_process(2, clip=CLIP)
    for name, weight in whole_weights(engine).items():
        torch.testing.assert_close(weight, expected.state[name], rtol=1e-5, atol=2e-6)


def test_nothing_leaks_out_of_the_subgroup(job, capfd, monkeypatch):
    """torch.distributed's world and the environment are as before, nothing was printed, nothing compiled or started."""
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "17")
    monkeypatch.setattr("subprocess.Popen", None)
    before = dict(os.environ)
    capfd.readouterr()
    for zero in (1, 2, 3):
        for dtype in (torch.float32, torch.bfloat16):
            trainee = Trainee(job, "odd", zero, clip=CLIP, dtype=dtype)
            trainee.step(0)
            if trainee.inside:
                with trainee.engine.gathered():
                    trainee.engine.model(global_batch(0).tokens_BT)
                whole_weights(trainee.engine)
    assert capfd.readouterr() == ("", "")
    assert {**before, "DS_ACCELERATOR": "cpu"} == {**os.environ, "DS_ACCELERATOR": "cpu"}
    assert dist.get_world_size() == job.world.size and dist.get_rank() == job.world.rank
    total = torch.ones(())
    dist.all_reduce(total)
    assert total.item() == job.world.size
