"""Tensor, sequence and pipeline parallelism of a model: who holds what of it, and the messages of the tp ranks.

Tensor parallelism (Megatron-LM, arXiv 1909.08053) cuts attention by key-value heads with their group of query heads,
the MLP by its intermediate dimension, embeddings and output layer by the vocabulary. Sequence parallelism (arXiv
2205.05198) cuts what lies between (norms, residual stream) by tokens, when sequences are packed. The convention:

- Between blocks a tp rank holds its share of the tokens: `gather_tokens` leads into a block, `scatter_tokens` out.
- What follows a `sum_over` or `collect_tokens` is computed alike on every tp rank, the loss included.
- A weight that tp splits gets its whole gradient where it lies. Every other weight (norms, q and k norms, the biases of
  o_proj and down_proj, score) is held by all tp ranks and gets a *partial* gradient on each: whoever trains sums these
  over the tp group (`is_split` tells which). Tied embeddings of several stages: over the first and the last stage too.
"""

# N tokens, n a tp rank's share of them, D hidden, V vocabulary

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.kernels.collectives import all_gather, reduce_scatter
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.plan.shard import Shard, split

Group = dist.ProcessGroup | None


@dataclass(frozen=True, slots=True)
class Parallel:
    """This rank's place in a model; the default holds the whole of it.

    The groups must outlive the model. `stages` carries nothing but what the stages say to each other inside a call.
    """

    shard: Shard = Shard()
    group: Group = None  # the tp ranks in tp order; None at tp 1
    stages: Group = None  # the ranks with this tp index, in stage order; None at pp 1
    previous: int | None = None  # the world rank that holds the stage before, None at the first
    next: int | None = None

    def __post_init__(self):
        assert (1 if self.group is None else self.group.size()) == self.shard.tp, (self.shard, self.group)

    @property
    def is_first(self) -> bool:
        return self.shard.stage == 0

    @property
    def is_last(self) -> bool:
        return self.shard.stage == self.shard.pp - 1


WHOLE = Parallel()


# ---- who holds what -------------------------------------------------------------------------------------------------

_QUERIES, _KEYS, _INNER, _VOCABULARY = "queries", "keys", "intermediate", "vocabulary"
_SPLIT = {  # end of a parameter's name -> the dim that tp splits, and what lies along it
    "q_proj.weight": (0, _QUERIES),
    "q_proj.bias": (0, _QUERIES),
    "k_proj.weight": (0, _KEYS),
    "k_proj.bias": (0, _KEYS),
    "v_proj.weight": (0, _KEYS),
    "v_proj.bias": (0, _KEYS),
    "o_proj.weight": (1, _QUERIES),
    "gate_proj.weight": (0, _INNER),
    "gate_proj.bias": (0, _INNER),
    "up_proj.weight": (0, _INNER),
    "up_proj.bias": (0, _INNER),
    "down_proj.weight": (1, _INNER),
    "embed_tokens.weight": (0, _VOCABULARY),
    "lm_head.weight": (0, _VOCABULARY),
}


def _kind(name: str) -> tuple[int, str] | None:
    return _SPLIT.get(".".join(name.split(".")[-2:]))


def is_split(name: str) -> bool:
    """Whether tp splits the parameter of this name; the gradients of the others are partial sums."""
    return _kind(name) is not None


def extent(config: ModelConfig, what: str, shard: Shard) -> range:
    """The part of a dim of the whole model that a tp slice holds, in numbers (a head counts head_dim)."""
    if what == _VOCABULARY:
        return split(config.vocab_size, shard.tp, shard.tp_index)
    if what == _INNER:
        return split(config.intermediate_size, shard.tp, shard.tp_index)
    heads = split(config.num_kv_heads, shard.tp, shard.tp_index)
    width = config.head_dim * (config.num_heads // config.num_kv_heads if what == _QUERIES else 1)
    return range(heads.start * width, heads.stop * width)


def cut(name: str, config: ModelConfig, shard: Shard) -> tuple[slice, ...]:
    """whole[cut(...)] is the slice of a parameter that a shard holds, if its stage holds the parameter at all."""
    kind = _kind(name)
    if kind is None or shard.tp == 1:
        return (slice(None),)
    dim, what = kind
    part = extent(config, what, shard)
    return (slice(None),) * dim + (slice(part.start, part.stop),)


def layers_of(config: ModelConfig, shard: Shard) -> range:
    """The layers of a stage, by their numbers in the whole model."""
    return split(config.num_layers, shard.pp, shard.stage)


def vocabulary_of(config: ModelConfig, shard: Shard) -> range:
    """The token ids whose embeddings and logits a tp slice holds."""
    return extent(config, _VOCABULARY, shard)


# ---- messages of the tp ranks: no-ops without a group ---------------------------------------------------------------


def gather_tokens(x_nD: Tensor, *, group: Group) -> Tensor:
    """Token shards -> all tokens x_ND. Backward sums: what each rank makes of the tokens is a part of the whole."""
    return x_nD if group is None else _Gather.apply(x_nD, group)


def scatter_tokens(x_ND: Tensor, *, group: Group) -> Tensor:
    """The sum of the ranks' partial x_ND -> this rank's share of its tokens x_nD; N is a multiple of the ranks."""
    return x_ND if group is None else _Scatter.apply(x_ND, group)


def sum_over(x: Tensor, *, group: Group) -> Tensor:
    """The sum of the ranks' parts, on every rank. What follows is computed alike, so a part's gradient is the sum's."""
    return x if group is None else _Sum.apply(x, group)


def collect_tokens(x_n: Tensor, *, group: Group) -> Tensor:
    """Token shards -> all tokens x_N, for what every rank computes alike: backward takes this rank's share."""
    return x_n if group is None else _Collect.apply(x_n, group)


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(len(x) * group.size(), *x.shape[1:])
    all_gather(out, x.contiguous(), group=group)
    return out


def _scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(len(x) // group.size(), *x.shape[1:])
    reduce_scatter(out, x.contiguous(), group=group)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_nD, group):
        ctx.group = group
        return gathered(x_nD, group)

    @staticmethod
    def backward(ctx, grad_ND):
        return _scattered(grad_ND, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, group):
        ctx.group = group
        return _scattered(x_ND, group)

    @staticmethod
    def backward(ctx, grad_nD):
        return gathered(grad_nD, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_n, group):
        ctx.group = group
        return gathered(x_n, group)

    @staticmethod
    def backward(ctx, grad_N):
        return grad_N.chunk(ctx.group.size())[ctx.group.rank()], None
