"""Tensor, sequence and pipeline parallelism of a model: the weights that each rank holds, and the tp collectives.

Tensor parallelism (Megatron-LM, arXiv 1909.08053) splits attention by key-value heads with their group of query heads,
the MLP by its intermediate dimension, embeddings and output layer by the vocabulary. Sequence parallelism (arXiv
2205.05198) splits norms and the residual stream by tokens, if sequences are packed. The convention:

- Between blocks a tp rank holds its share of the tokens; a block begins with `gather_tokens` and ends with
  `scatter_tokens`.
- After `sum_over` or `collect_tokens`, every tp rank computes the same, including the loss.
- A weight that tp splits gets its whole gradient on its rank. Every other weight (norms, q and k norms, the biases of
  o_proj and down_proj, score, one factor of each adapter) is held by all tp ranks and gets a *partial* gradient on
  each, which the training engine sums over the tp group (see `is_split`). Gradients of tied embeddings are also summed
  over the first and last stage.
"""

# N tokens, n a tp rank's share of them, D hidden, V vocabulary

from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.kernels import one_shot
from rlhf_spmd.kernels.collectives import all_gather, reduce_scatter
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.plan.adapters import A, B
from rlhf_spmd.plan.shard import Shard, split

Group: TypeAlias = dist.ProcessGroup | None


@dataclass(frozen=True, slots=True)
class Parallel:
    """This rank's place in a model; by default it holds the whole model.

    The groups must outlive the model. `stages` carries only the messages between stages inside a call.
    """

    shard: Shard = Shard()
    group: Group = None  # the tp ranks in tp order; None at tp 1
    stages: Group = None  # the ranks with this tp index, in stage order; None at pp 1
    previous: int | None = None  # the world rank that holds the stage before, None at the first
    next: int | None = None
    copy: Group = None  # all ranks of the model, stage by stage; None at pp = tp = 1

    def __post_init__(self):
        assert (1 if self.group is None else self.group.size()) == self.shard.tp, (self.shard, self.group)

    @property
    def is_first(self) -> bool:
        return self.shard.stage == 0

    @property
    def is_last(self) -> bool:
        return self.shard.is_last

    @property
    def reports(self) -> bool:
        """Whether this rank reports for its copy of the model, as `Layout.reports` says."""
        return self.is_last and self.shard.tp_index == 0


WHOLE = Parallel()


# ---- the slices of a shard ------------------------------------------------------------------------------------------

_QUERIES, _KEYS, _INNER, _VOCABULARY = "queries", "keys", "intermediate", "vocabulary"
_GATE_UP, _DOWN = "experts.gate_up_proj", "experts.down_proj"
_SPLIT = {  # module -> the dim of its weight that tp splits, and its meaning; dim 0 is also that of the bias
    "q_proj": (0, _QUERIES),
    "k_proj": (0, _KEYS),
    "v_proj": (0, _KEYS),
    "o_proj": (1, _QUERIES),
    "gate_proj": (0, _INNER),
    "up_proj": (0, _INNER),
    "down_proj": (1, _INNER),
    _GATE_UP: (0, _GATE_UP),
    _DOWN: (0, _DOWN),
    "embed_tokens": (0, _VOCABULARY),
    "lm_head": (0, _VOCABULARY),
}
_WHOLE = {"bias": 1, A: 0, B: 1}  # what else a module has -> if its weight is split in this dim, that is whole


def _split_of(name: str) -> tuple[int, str] | None:
    module, _, kind = name.rpartition(".")
    *_, block, last = "", *module.split(".")
    split_dim = _SPLIT.get(f"{block}.{last}") or _SPLIT.get(last)
    return None if split_dim is None or _WHOLE.get(kind) == split_dim[0] else split_dim


def is_split(name: str) -> bool:
    """Returns whether tp splits the parameter of this name; the gradients of the others are partial sums."""
    return _split_of(name) is not None


def extent(config: ModelConfig, what: str, shard: Shard) -> range:
    """Returns the range of a dim of the whole model that a tp slice holds, in elements (a head has head_dim)."""
    if what == _VOCABULARY:
        return split(config.vocab_size, shard.tp, shard.tp_index)
    if what == _INNER:
        return split(config.intermediate_size, shard.tp, shard.tp_index)
    if what in (_GATE_UP, _DOWN):
        experts, rows = experts_of(config, shard), 2 * config.expert_size if what == _GATE_UP else config.hidden_size
        return range(experts.start * rows, experts.stop * rows)
    heads = split(config.num_kv_heads, shard.tp, shard.tp_index)
    width = config.head_dim * (config.num_heads // config.num_kv_heads if what == _QUERIES else 1)
    return range(heads.start * width, heads.stop * width)


def slice_of(name: str, config: ModelConfig, shard: Shard) -> tuple[slice, ...]:
    """Returns the slice of a parameter that a shard holds: whole[slice_of(...)], if its stage holds the parameter."""
    kind = _split_of(name)
    if kind is None or shard.tp == 1:
        return (slice(None),)
    dim, what = kind
    part = extent(config, what, shard)
    return (slice(None),) * dim + (slice(part.start, part.stop),)


def experts_of(config: ModelConfig, shard: Shard) -> range:
    """Returns the experts of a mixture that a tp slice holds."""
    return split(config.num_experts, shard.tp, shard.tp_index)


def layers_of(config: ModelConfig, shard: Shard) -> range:
    """Returns the layers of a stage, by their numbers in the whole model."""
    return split(config.num_layers, shard.pp, shard.stage)


def vocabulary_of(config: ModelConfig, shard: Shard) -> range:
    """Returns the token ids whose embeddings and logits a tp slice holds."""
    return extent(config, _VOCABULARY, shard)


# ---- collectives of the tp ranks: no-ops without a group ------------------------------------------------------------


def gather_tokens(x_nD: Tensor, *, group: Group) -> Tensor:
    """Gathers token shards to all tokens x_ND. Backward sums the ranks' gradients, which are partial sums."""
    return x_nD if group is None else _Collective.apply(x_nD, group, all_gather_rows, _reduce_scatter_rows)


def scatter_tokens(x_ND: Tensor, *, group: Group) -> Tensor:
    """Sums the ranks' partial x_ND and returns this rank's share of its tokens x_nD; N is a multiple of the ranks."""
    return x_ND if group is None else _Collective.apply(x_ND, group, _reduce_scatter_rows, all_gather_rows)


def sum_over(x: Tensor, *, group: Group) -> Tensor:
    """Sums the ranks' parts, on every rank; without gradients in place. All ranks continue identically, so a part's
    gradient is the sum's."""
    if group is not None and not torch.is_grad_enabled():
        if not one_shot.sum_in_place(x, group):
            dist.all_reduce(x, group=group)
        return x
    return x if group is None else _Collective.apply(x, group, all_reduced, lambda gradient, _: gradient)


def collect_tokens(x_n: Tensor, *, group: Group) -> Tensor:
    """Gathers token shards to all tokens x_N, if all ranks continue identically: backward takes this rank's share."""
    if group is None:
        return x_n
    return _Collective.apply(x_n, group, all_gather_rows, lambda x_N, ranks: x_N.chunk(ranks.size())[ranks.rank()])


def all_gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(len(x) * group.size(), *x.shape[1:])
    all_gather(out, x.contiguous(), group=group)
    return out


def _reduce_scatter_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(len(x) // group.size(), *x.shape[1:])
    reduce_scatter(out, x.contiguous(), group=group)
    return out


def smallest(number: int, parallel: Parallel, device: torch.device) -> int:
    """Returns the minimum over all ranks of one copy."""
    groups = [group for group in (parallel.group, parallel.stages) if group is not None]
    least = torch.tensor(number, device=device if groups else None)
    for group in groups:
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return int(least)


def broadcast_in_copy(x: Tensor, parallel: Parallel) -> Tensor:
    """Broadcasts x from the rank that reports to all ranks of one copy, in place."""
    if parallel.copy is not None:
        dist.broadcast(x, group_src=(parallel.shard.pp - 1) * parallel.shard.tp, group=parallel.copy)
    return x


def all_reduced(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the sum over a group, as a new tensor."""
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


class _Collective(torch.autograd.Function):
    """forward: compute(x, group); backward: gradient_of(its gradient, group)."""

    @staticmethod
    def forward(ctx, x, group, compute, gradient_of):
        ctx.group, ctx.gradient_of = group, gradient_of
        return compute(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.gradient_of(gradient, ctx.group), None, None, None
