"""A small model, its data and its training in plain torch, to compare train engines with."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from rlhf_spmd.runtime.engines.adamw import EngineOptions
from rlhf_spmd.runtime.engines.flat_engine import FlatEngine, Groups
from rlhf_spmd.runtime.engines.train_engine import TrainEngine, make_engine
from rlhf_spmd.runtime.world.world import World
from tests.steps import engine_step

VOCAB, HIDDEN, LENGTH = 37, 14, 6  # sizes that no number of ranks divides
LR, CLIP = 3e-2, 0.4


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
    """Returns uneven shares: the first rank gets half the rows, the last none (from three ranks on), the others the
    rest."""
    rows = len(batch.tokens_BT)
    cuts = [0, *(rows // 2 + (rows - rows // 2) * i // max(size - 2, 1) for i in range(size - 1)), rows]
    own = batch.tokens_BT[cuts[rank] : cuts[rank + 1]]
    parts = [part for part in own.tensor_split(num_micro) if len(part)]
    batches = [Batch(part, 1.0, batch.num_targets) for part in parts]
    nothing = Batch(torch.zeros(1, LENGTH, dtype=torch.long), 0.0, batch.num_targets)
    return batches + [nothing] * (num_micro - len(batches))


def share_of_loss(model: Tiny, batch: Batch) -> Tensor:
    """Returns the next-token cross entropy of these rows, divided by the global number of targets."""
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
    steps: int, *, clip: float | None, dtype=torch.float32, seed=1, lr=LR, decay=0.0, bare=(), rounded=False
) -> Run:
    """Does the same training without any of our code.

    bare: parts of the names of weights without weight decay.
    rounded: start from weights rounded to bfloat16.
    """
    model = tiny(seed)
    if rounded:
        model.bfloat16()
    model.to(dtype)
    decaying, others = [], []
    for name, p in model.named_parameters():
        (others if any(part in name for part in bare) else decaying).append(p)
    optimizer = torch.optim.AdamW(decaying, lr=lr, betas=(0.9, 0.95), eps=1e-5, weight_decay=decay)
    if others:
        optimizer.add_param_group({"params": others, "weight_decay": 0.0})
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


def whole_weights(engine: TrainEngine) -> dict[str, Tensor]:
    """Returns all weights of a model in training. Collective at stage 3."""
    with engine.gathered():
        return {name: p.detach().clone() for name, p in engine.model.named_parameters()}


@torch.no_grad()
def whole_gradients(engine: TrainEngine) -> dict[str, Tensor]:
    """Returns all gradients of the own engine after they have been summed. Collective, without a change."""
    whole, data = engine._parts[0].new_zeros(engine._layout.numel), engine._groups.data
    for bucket, part in zip(engine._layout.buckets, engine._parts, strict=True):
        parts = [part] if data is None else [torch.empty_like(part) for _ in range(data.size())]
        if data is not None:
            dist.all_gather(parts, part, group=data)
        whole[bucket.interval] = torch.cat(parts)
    return dict(zip(engine._layout.names, engine._layout.views(whole), strict=True))


def noted_gradients(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Returns the summed gradients of each later step of the own engine, in the order of the model's parameters."""
    noted: list[Tensor] = []
    real = FlatEngine._norm

    def norm(engine: FlatEngine) -> float:
        gradients = whole_gradients(engine)
        names = [name for name, _ in engine.model.named_parameters() if name in gradients]
        noted.append(torch.cat([gradients[name].flatten() for name in names]))
        return real(engine)

    monkeypatch.setattr(FlatEngine, "_norm", norm)
    return noted


class Trainee:
    """An engine on a named group with its data and its log; does nothing on ranks outside the group.

    sums: groups in which it sums gradients.
    """

    def __init__(
        self, job: Job, group: str, zero: int, *, clip: float | None, num_micro=1, seed=1, lr=LR, sums=(), **options
    ):
        (self.group,), self.ranks = job.groups(group), job.ranks(group)
        self.num_micro, self.lr, self.run = num_micro, lr, Run([], [], {})
        self.inside = job.world.rank in self.ranks
        if self.inside:
            self.rank = self.ranks.index(job.world.rank)
            self.engine = make_engine(
                tiny(seed),
                groups=Groups(data=self.group, sums=sums),
                options=EngineOptions(zero, max_grad_norm=clip, **options),
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

        grad_norm = engine_step(self.engine, batches, loss, lr=self.lr)
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        self.run.losses.append(total.item())
        self.run.norms.append(grad_norm)

    def check(self, expected: Run, *, rtol: float = 1e-5) -> None:
        if not self.inside:
            return
        assert self.run.losses == pytest.approx(expected.losses, rel=rtol)
        assert self.run.norms == pytest.approx(expected.norms, rel=rtol)
        state = whole_weights(self.engine)
        assert list(state) == list(expected.state)
        for name, weight in state.items():
            difference = (weight - expected.state[name]).norm() / expected.state[name].norm()
            assert difference < rtol, (name, difference)
