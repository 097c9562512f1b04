"""Every ZeRO stage on every kind of subgroup against one process running plain torch on the whole batch.

    python tests/run_mpi.py 4 --limit 300 -- tests/mpi/test_train_engine.py

Runs at 2 to 8 ranks; cases that do not fit are skipped. Costs 90 s of processor time at 4 ranks.
"""

import functools
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime import train_engine
from rlhf_spmd.runtime.train_engine import make_engine
from rlhf_spmd.runtime.world import World

VOCAB, HIDDEN, LENGTH = 37, 14, 6  # sizes that no number of ranks divides
LR, CLIP = 3e-2, 0.4

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]


# --- The groups -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    world: World
    make_group: Callable  # ranks -> process group, called by every rank

    def ranks(self, name: str) -> list[int]:
        size = self.world.size
        named = {
            "all": range(size),
            "one": [size - 1],
            "first half": range(size // 2),
            "last": range(size // 2, size),
            "odd": [1, 2, 3],
            "apart": [0, 2, 3, 4, 6],
        }
        ranks = list(named[name])
        if ranks[-1] >= size or (name in ("first half", "last") and size < 4):
            pytest.skip(f"group {name!r} needs more ranks than {size}")
        return ranks

    def groups(self, *names: str) -> list[dist.ProcessGroup | None]:
        ranks = [self.ranks(name) for name in names]  # skips before any group is made
        return [self.make_group(r) for r in ranks]


@pytest.fixture
def job(world, make_group):
    return Job(world, make_group)


@pytest.fixture(scope="module", autouse=True)
def cheap_garbage_collection():
    """DeepSpeed collects garbage whenever it makes an engine, which costs 0.3 s with all its modules to go through."""
    train_engine._import_deepspeed(torch.device("cpu"))
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


# --- The model, the data and the single process -------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mix = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)  # a key's bias has no gradient but noise, and Adam scales
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x_BTD)).chunk(3, -1)
        return x_BTD + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Tiny(nn.Module):
    """A language model whose output layer is its embedding, read outside any module's forward (ZeRO 3's hard case)."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.norm(x_BTD)

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        return F.linear(hidden_BTD, self.embed.weight)


def tiny(seed: int = 1) -> Tiny:
    torch.manual_seed(seed)
    return Tiny()


@dataclass
class Batch:
    tokens_BT: Tensor
    weight: float  # 0 in a batch that stands in for none
    num_targets: int  # of the global batch


def global_batch(step: int, rows: int = 11) -> Batch:
    generator = torch.Generator().manual_seed(1000 + step)
    tokens_BT = torch.randint(VOCAB, (rows, LENGTH), generator=generator)
    return Batch(tokens_BT, 1.0, rows * (LENGTH - 1))


def shares(batch: Batch, *, size: int, rank: int, num_micro: int) -> list[Batch]:
    """Uneven shares: the first rank gets half the rows, the last none (from three ranks on), the others the rest."""
    rows = len(batch.tokens_BT)
    cuts = [0, *(rows // 2 + (rows - rows // 2) * i // max(size - 2, 1) for i in range(size - 1)), rows]
    own = batch.tokens_BT[cuts[rank] : cuts[rank + 1]]
    parts = [part for part in own.tensor_split(num_micro) if len(part)]
    batches = [Batch(part, 1.0, batch.num_targets) for part in parts]
    nothing = Batch(torch.zeros(1, LENGTH, dtype=torch.long), 0.0, batch.num_targets)
    return batches + [nothing] * (num_micro - len(batches))


def share_of_loss(model: Tiny, batch: Batch) -> Tensor:
    """Next-token cross entropy of these rows, divided by the global number of targets."""
    logits_BTV = model.logits(model(batch.tokens_BT[:, :-1]))
    wide = logits_BTV if logits_BTV.dtype == torch.float64 else logits_BTV.float()
    loss = F.cross_entropy(wide.flatten(0, 1), batch.tokens_BT[:, 1:].flatten(), reduction="sum")
    return loss * batch.weight / batch.num_targets


@dataclass
class Run:
    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]


@functools.cache
def single_process(
    steps: int, *, clip: float | None, dtype=torch.float32, seed=1, lr=LR, decay=0.0, rounded=False
) -> Run:
    """The same training without any of our code. rounded: start from weights rounded to bfloat16."""
    model = tiny(seed)
    if rounded:
        model.bfloat16()
    model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-5, weight_decay=decay)
    run = Run([], [], {})
    for step in range(steps):
        optimizer.zero_grad()
        loss = share_of_loss(model, global_batch(step))
        loss.backward()
        run.losses.append(loss.item())
        run.norms.append(nn.utils.clip_grad_norm_(model.parameters(), torch.inf if clip is None else clip).item())
        optimizer.step()
    run.state = {name: p.detach() for name, p in model.named_parameters()}
    return run


class Trainee:
    """An engine on a named group with its data and its log; does nothing on ranks outside the group."""

    def __init__(self, job: Job, group: str, zero: int, *, clip: float | None, num_micro=1, seed=1, lr=LR, **options):
        (self.group,), self.ranks = job.groups(group), job.ranks(group)
        self.num_micro, self.lr, self.run = num_micro, lr, Run([], [], {})
        self.inside = job.world.rank in self.ranks
        if self.inside:
            self.rank = self.ranks.index(job.world.rank)
            self.engine = make_engine(
                tiny(seed), group=self.group, ranks=self.ranks, zero=zero, max_grad_norm=clip, **options
            )

    def step(self, step: int) -> None:
        if not self.inside:
            return
        batches = shares(global_batch(step), size=len(self.ranks), rank=self.rank, num_micro=self.num_micro)
        assert len(batches) == self.num_micro
        total = torch.zeros((), dtype=torch.float64)

        def loss(model: Tiny, batch: Batch) -> Tensor:
            share = share_of_loss(model, batch)
            total.add_(share.detach().double())
            return share

        stats = self.engine.step(batches, loss, lr=self.lr)
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        self.run.losses.append(total.item())
        self.run.norms.append(stats.grad_norm)

    def check(self, expected: Run, *, rtol: float = 1e-5) -> None:
        if not self.inside:
            return
        assert self.run.losses == pytest.approx(expected.losses, rel=rtol)
        assert self.run.norms == pytest.approx(expected.norms, rel=rtol)
        state = self.engine.state()
        assert list(state) == list(expected.state)
        for name, weight in state.items():
            difference = (weight - expected.state[name]).norm() / expected.state[name].norm()
            assert difference < rtol, (name, difference)


# --- Against the single process -----------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["all", "first half", "last", "odd", "apart", "one"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_training_equals_single_process(job, group, zero):
    """Uneven data (one rank without any), 1 to 3 micro-batches, clipping active; the other ranks do nothing."""
    for num_micro in {"all": (1, 2, 3), "one": (1, 2), "odd": (3,)}.get(group, (2,)):
        trainee = Trainee(job, group, zero, clip=CLIP, num_micro=num_micro)
        for step in range(4):
            trainee.step(step)
        trainee.check(single_process(4, clip=CLIP))
        assert not trainee.inside or min(trainee.run.norms) > CLIP


@pytest.mark.parametrize("clip", [None, 1e3], ids=["never", "not reached"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_without_clipping_with_weight_decay(job, zero, clip):
    trainee = Trainee(job, "all", zero, clip=clip, num_micro=2, weight_decay=0.1)
    for step in range(3):
        trainee.step(step)
    trainee.check(single_process(3, clip=clip, decay=0.1))


TWO = [
    ("all", "all", 1, 1),
    ("all", "all", 3, 3),
    ("all", "all", 2, 3),
    ("all", "all", 0, 1),
    ("all", "first half", 1, 2),
    ("all", "first half", 3, 3),
    ("all", "odd", 3, 1),
    ("first half", "last", 3, 2),
    ("first half", "odd", 3, 3),
    ("odd", "last", 2, 1),
    ("odd", "all", 0, 3),
]


@pytest.mark.parametrize("actor_first", [True, False], ids=["actor first", "critic first"])
@pytest.mark.parametrize(("actor_group", "critic_group", "actor_zero", "critic_zero"), TWO)
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


@pytest.mark.parametrize("group", ["all", "odd"])
def test_float64_gradients(job, group):
    trainee = Trainee(job, group, 0, clip=None, num_micro=2, dtype=torch.float64)
    trainee.step(0)
    model = tiny().double()
    share_of_loss(model, global_batch(0)).backward()
    if trainee.inside:
        for (name, p), q in zip(trainee.engine.model.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14, msg=lambda m, n=name: n + m)
    trainee.check(single_process(1, clip=None, dtype=torch.float64), rtol=1e-11)


# --- bfloat16 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["all", "odd", "one"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
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
    for name, weight in trainee.engine.state().items():
        assert weight.dtype == torch.bfloat16
        errors.append((weight.float() - expected.state[name]).abs().flatten())
        ways.append((start[name] - expected.state[name]).abs().flatten())
    # Rounding leaves a quarter of the last digit on average; the way is many updates, each lost on its own.
    assert torch.cat(errors).mean() < 0.4 * torch.cat(ways).mean()


# --- ZeRO 3: full weights on demand -------------------------------------------------------------------------


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


def test_gathered_shards_again_after_an_error(job):
    trainee = Trainee(job, "all", 3, clip=CLIP)
    with pytest.raises(ZeroDivisionError), trainee.engine.gathered():
        1 / 0  # noqa: B018
    for step in range(2):
        trainee.step(step)
    trainee.check(single_process(2, clip=CLIP))


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_gathered_is_nothing_below_stage_3(job, zero):
    trainee = Trainee(job, "all", zero, clip=CLIP)
    with trainee.engine.gathered():
        assert all(p.numel() > 0 for p in trainee.engine.model.parameters())


# --- Edges --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_and_infinite_gradients(job, zero, dtype):
    """No gradient: no change, norm 0. One that is not finite on one rank: no change anywhere, and the norm says so."""
    trainee = Trainee(job, "all", zero, clip=CLIP, dtype=dtype)
    trainee.step(0)
    engine = trainee.engine
    before = {name: weight.clone() for name, weight in engine.state().items()}
    batches = shares(global_batch(1), size=len(trainee.ranks), rank=trainee.rank, num_micro=1)
    stats = engine.step(batches, lambda model, batch: share_of_loss(model, batch) * 0.0, lr=0.0)
    assert stats.grad_norm == 0
    factor = torch.inf if trainee.rank == 0 else 1.0
    stats = engine.step(batches, lambda model, batch: share_of_loss(model, batch) * factor, lr=LR)
    assert not torch.isfinite(torch.tensor(stats.grad_norm))
    for name, weight in engine.state().items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=0)
    trainee.step(2)
    assert torch.isfinite(torch.tensor(trainee.run.norms[-1]))


def test_a_rank_may_return_a_constant_at_stage_0(job):
    rank = job.world.rank
    engine = make_engine(tiny(), group=job.groups("all")[0], ranks=job.ranks("all"), zero=0, max_grad_norm=CLIP)
    for step in range(2):
        batch = global_batch(step)
        engine.step([batch], lambda m, b: share_of_loss(m, b) if rank == 0 else torch.zeros(()), lr=LR)
    expected = single_process(2, clip=CLIP)
    for name, weight in engine.state().items():
        torch.testing.assert_close(weight, expected.state[name], rtol=1e-5, atol=2e-6)


def test_different_starts_are_refused(job):
    with pytest.raises(AssertionError, match="different weights"):
        make_engine(tiny(job.world.rank), group=job.groups("all")[0], ranks=job.ranks("all"), zero=1)


def test_what_cannot_be_had_is_refused(job):
    for zero, dtype, named in ((4, torch.float32, "stage 4"), (1, torch.float64, "zero=0"), (0, torch.half, "16")):
        with pytest.raises(UserError, match=named):
            make_engine(tiny(), group=None, ranks=[0], zero=zero, dtype=dtype)


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
                trainee.engine.state()
    assert capfd.readouterr() == ("", "")
    assert {**before, "DS_ACCELERATOR": "cpu"} == {**os.environ, "DS_ACCELERATOR": "cpu"}
    assert dist.get_world_size() == job.world.size and dist.get_rank() == job.world.rank
    total = torch.ones(())
    dist.all_reduce(total)
    assert total.item() == job.world.size


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

    model, ranks = Transformer(config, head="lm", seed=3), job.ranks("all")
    engine = make_engine(
        Transformer(config, head="lm", seed=3), group=job.groups("all")[0], ranks=ranks, zero=zero, max_grad_norm=None
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
    for _ in range(3):
        stats = engine.step([tokens_BT[job.world.rank, None]], share, lr=1e-2)
        optimizer.zero_grad()
        (share(model, tokens_BT) * job.world.size).backward()
        assert stats.grad_norm == pytest.approx(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        optimizer.step()
    with engine.gathered(), torch.no_grad():
        torch.testing.assert_close(engine.model(tokens_BT), model(tokens_BT), rtol=1e-4, atol=1e-5)
