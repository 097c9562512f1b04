"""Every ZeRO stage on every kind of subgroup against one process running plain torch on the whole batch.

    python tests/run_mpi.py 4 --limit 300 -- tests/mpi/test_train_engine.py

Runs at 2 to 8 ranks; cases that do not fit are skipped. Costs 90 s of processor time at 4 ranks.
"""

import pytest
import torch
from torch import Tensor, nn

from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.engines.adamw import EngineOptions
from rlhf_spmd.runtime.engines.flat_engine import Groups
from rlhf_spmd.runtime.engines.train_engine import make_engine
from tests.steps import engine_step
from tests.trainee import (
    CLIP,
    VOCAB,
    Trainee,
    global_batch,
    noted_gradients,
    share_of_loss,
    single_process,
    tiny,
    whole_weights,
)

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.usefixtures("cheap_garbage_collection"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]


# --- Against the single process -----------------------------------------------------------------------------


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("zero", "group"),
    [
        *((zero, "all") for zero in range(4)),
        *((1, "first half"), (2, "last"), (3, "odd"), (0, "one"), (2, "odd")),
        pytest.param(3, "apart", marks=pytest.mark.ranks(8)),  # ranks up to 6
    ],
)
def test_training_equals_single_process(job, group, zero):
    """Uneven data (one rank without any), 1 to 3 micro-batches, clipping active; the other ranks do nothing."""
    for num_micro in {"all": (1, 2, 3), "one": (1, 2), "odd": (3,)}.get(group, (2,)):
        trainee = Trainee(job, group, zero, clip=CLIP, num_micro=num_micro)
        for step in range(4):
            trainee.step(step)
        trainee.check(single_process(4, clip=CLIP))
        assert not trainee.inside or min(trainee.run.norms) > CLIP


@pytest.mark.rotates
@pytest.mark.parametrize(("zero", "clip"), [(0, None), (1, 1e3), (2, None), (3, 1e3)])
def test_without_clipping_with_weight_decay(job, zero, clip):
    trainee = Trainee(job, "all", zero, clip=clip, num_micro=2, weight_decay=0.1)
    for step in range(3):
        trainee.step(step)
    trainee.check(single_process(3, clip=clip, decay=0.1))


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("zero", "on", "bare"),
    [
        (0, "linear", ("norm", "bias", "embed")),
        (1, "linear", ("norm", "bias", "embed")),
        (1, "matrices", ("norm", "bias")),
        (2, "linear", ("norm", "bias", "embed")),
        (3, "matrices", ("norm", "bias")),
    ],
)
def test_weight_decay_on_some_weights(job, zero, on, bare):
    """An engine that goes on from the state has the same bits. (At stage 0 a rank stores a part, and reads all.)"""
    trainees = [
        Trainee(job, "all", zero, clip=CLIP, num_micro=2, weight_decay=0.5, weight_decay_on=on)
        for _ in range(2 if zero else 1)
    ]
    for step in range(2):
        trainees[0].step(step)
    num_steps, state = trainees[0].engine.optimizer_state()
    kept = {(kind, name): x.clone() for name, kinds in state.items() for kind, x in kinds.items()}
    for trainee in trainees[1:]:
        trainee.engine.load(num_steps, lambda kind, interval: kept[kind, interval])
        trainee.engine.publish()
    for trainee in trainees:
        trainee.step(2)
    trainees[0].check(single_process(3, clip=CLIP, decay=0.5, bare=bare))
    pairs = zip(*(whole_weights(one.engine).values() for one in (trainees[0], trainees[-1])), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


TWO = [
    ("all", "all", 1, 1),
    ("all", "all", 2, 3),
    ("all", "first half", 3, 3),
    ("all", "odd", 3, 1),
    ("first half", "last", 3, 2),
    ("odd", "all", 0, 3),
]


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("actor_group", "critic_group", "actor_zero", "critic_zero", "actor_first"),
    [(*case, number % 2 == 0) for number, case in enumerate(TWO)],
)
def test_two_engines(job, actor_group, critic_group, actor_zero, critic_zero, actor_first):
    """Two models live on the same ranks, whichever was made first, and take turns."""
    job.groups(actor_group, critic_group)  # skips here, on every rank, or not at all
    made = {}
    for name in ("actor", "critic") if actor_first else ("critic", "actor"):
        if name == "actor":
            made[name] = Trainee(job, actor_group, actor_zero, clip=CLIP, num_micro=2, seed=1)
        else:
            made[name] = Trainee(job, critic_group, critic_zero, clip=None, num_micro=1, seed=2, lr=1e-2)
    for step in range(3):
        made["actor"].step(step)
        made["critic"].step(step)
    made["actor"].check(single_process(3, clip=CLIP, seed=1))
    made["critic"].check(single_process(3, clip=None, seed=2, lr=1e-2))


@pytest.mark.rotates
@pytest.mark.parametrize(("zero", "group"), [(0, "odd"), (1, "all")])
def test_float64_gradients(job, group, zero, monkeypatch):
    noted = noted_gradients(monkeypatch)
    trainee = Trainee(job, group, zero, clip=None, num_micro=2, dtype=torch.float64)
    trainee.step(0)
    model = tiny().double()
    share_of_loss(model, global_batch(0)).backward()
    if trainee.inside:
        expected = torch.cat([q.grad.flatten() for q in model.parameters()])
        torch.testing.assert_close(noted, [expected], rtol=1e-12, atol=1e-14)
    trainee.check(single_process(1, clip=None, dtype=torch.float64), rtol=1e-11)


@pytest.mark.rotates
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_our_transformer(job, zero):
    """The model that the program trains, with tied embeddings, whole rows and its own forward."""
    config = ModelConfig(
        model_type="qwen3",
        vocab_size=VOCAB,
        hidden_size=12,
        intermediate_size=20,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        tie_embeddings=True,
        qk_norm=True,
    )
    tokens_BT = global_batch(0, rows=job.world.size).tokens_BT

    def share(model: Transformer, tokens_BT: Tensor) -> Tensor:
        logprobs_BTV = model.logits(model(tokens_BT[:, :-1])).log_softmax(-1)
        return -logprobs_BTV.gather(-1, tokens_BT[:, 1:, None]).sum() / tokens_BT[:, 1:].numel() / job.world.size

    model = Transformer(config, head="lm", seed=3)
    engine = make_engine(
        Transformer(config, head="lm", seed=3),
        groups=Groups(data=job.groups("all")[0]),
        options=EngineOptions(zero, max_grad_norm=None),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
    for _ in range(3):
        grad_norm = engine_step(engine, [tokens_BT[job.world.rank, None]], share, lr=1e-2)
        optimizer.zero_grad()
        (share(model, tokens_BT) * job.world.size).backward()
        assert grad_norm == pytest.approx(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        optimizer.step()
    with engine.gathered(), torch.no_grad():
        torch.testing.assert_close(engine.model(tokens_BT), model(tokens_BT), rtol=1e-4, atol=1e-5)


# --- bfloat16 -----------------------------------------------------------------------------------------------


@pytest.mark.rotates
@pytest.mark.parametrize(("zero", "group"), [(0, "odd"), (1, "all"), (2, "one"), (3, "all")])
def test_bfloat16_stays_close(job, group, zero):
    """Learning rates far below bfloat16's last digit add up in float32 masters; sums over micro-batches keep digits."""
    steps, lr = 30, 3e-4
    trainee = Trainee(job, group, zero, clip=CLIP, num_micro=2, lr=lr, dtype=torch.bfloat16)
    for step in range(steps):
        trainee.step(step)
    if not trainee.inside:
        return
    expected = single_process(steps, clip=CLIP, lr=lr, rounded=True)
    assert trainee.run.losses == pytest.approx(expected.losses, rel=2e-2)
    assert trainee.run.norms == pytest.approx(expected.norms, rel=2e-2)
    start = dict(tiny().bfloat16().float().named_parameters())
    errors, ways = [], []
    for name, weight in whole_weights(trainee.engine).items():
        assert weight.dtype == torch.bfloat16
        errors.append((weight.float() - expected.state[name]).abs().flatten())
        ways.append((start[name] - expected.state[name]).abs().flatten())
    # Rounding leaves a quarter of the last digit on average; the way is many updates, each lost on its own.
    assert torch.cat(errors).mean() < 0.4 * torch.cat(ways).mean()
