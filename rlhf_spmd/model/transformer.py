"""The transformer: one definition of all families for training, scoring and generation.

Training, log-probabilities and decoding run the same code, so generation and training agree up to rounding. With cached
keys, some operations are `fast`: the same formulas without a backward pass. Parameter names are Hugging Face's without
the leading `model.`; heads are `lm_head` (absent if tied) and `score`. A shard of a model (parallel.py) keeps the
parameter names and layer numbers of the whole model.
"""

# B sequences, T current tokens, N tokens of packed sequences, V vocabulary, D hidden, H heads, K key-value heads,
# d head_dim, f frequencies; V, H and K are those of this rank's slice. A leading [...] is [B, T] or, if packed, [N];
# between the blocks of a packed pass, it is this tp rank's share of N.

import hashlib
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlhf_spmd.kernels.products import product, rows_for
from rlhf_spmd.kernels.soft_cap import capped
from rlhf_spmd.kernels.triton_import import fused
from rlhf_spmd.model.attention import AttentionContext, Padded
from rlhf_spmd.model.config import MOST_EXPERTS, ModelConfig
from rlhf_spmd.model.experts import SparseMLP
from rlhf_spmd.model.gates import steps
from rlhf_spmd.model.linear import AdaptedLinear, Again, Linear, LowRank, lay_adjacent, together
from rlhf_spmd.model.norm import Norm, make_norm, norm_of_all_heads, normed_sum, sum_of
from rlhf_spmd.model.parallel import (
    WHOLE,
    Group,
    Parallel,
    extent,
    gather_tokens,
    layers_of,
    scatter_tokens,
    slice_of,
    sum_over,
    vocabulary_of,
)
from rlhf_spmd.model.rope import Ropes, Turns, turned
from rlhf_spmd.model.row_linear import AdaptedRowLinear, RowLinear
from rlhf_spmd.plan.adapters import A, Adapters, is_factor, site
from rlhf_spmd.plan.norms import NORMS
from rlhf_spmd.plan.shard import Shard

Head = Literal["lm", "scalar"]


class Embedding(nn.Module):
    """Token embeddings, or the output layer, or with tied embeddings both.

    A head runs inside forward(), because engines that shard weights (ZeRO 3) gather them around module calls.
    """

    def __init__(self, vocabulary: range, hidden_size: int, group: Group):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(len(vocabulary), hidden_size))
        self.first, self.group = vocabulary.start, group

    def forward(self, x: Tensor, *, packed: bool = False, head: Callable | None = None) -> Tensor:
        """Embeds tokens [...] -> hidden [..., D] (packed: this rank's share). With a head, returns head(hidden, weight)
        instead."""
        if head is not None:
            return head(x, self.weight)
        if self.group is None:
            return F.embedding(x, self.weight)
        local = x - self.first
        elsewhere = (local < 0) | (local >= len(self.weight))  # tokens of other ranks
        part = F.embedding(local.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere[..., None], 0.0)
        return scatter_tokens(part, group=self.group) if packed else sum_over(part, group=self.group)


class Attention(nn.Module):
    """Causal grouped-query attention over this rank's heads, with rotary positions in most models' layers."""

    together, alone = ("q_proj", "k_proj", "v_proj"), ("o_proj",)  # matrices that read the same input, and others

    def __init__(self, config: ModelConfig, layer: int, parallel: Parallel):
        super().__init__()
        self.layer, self.head_dim, self.window = layer, config.head_dim, config.window(layer)
        self.rope = config.rope_of(layer)
        self.turns: dict[str, Any] = {"dim": config.rotary_dim, "alternates": config.rope_alternates}
        self.group = parallel.group
        queries, keys = (len(extent(config, what, parallel.shard)) for what in ("queries", "keys"))
        self.sizes = [queries, keys, keys]
        self.q_proj = Linear(config.hidden_size, queries, bias=config.attention_bias)
        self.k_proj = Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.v_proj = Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.o_proj = RowLinear(queries, config.hidden_size, bias=config.attention_output_bias, group=self.group)
        self.qk_norm, self.qk_norm_of_all = config.qk_norm, config.qk_norm_of_all
        if self.qk_norm and not self.qk_norm_of_all:
            self.q_norm, self.k_norm = (make_norm(config.head_dim, config) for _ in range(2))
        elif self.qk_norm:
            self.q_norm = norm_of_all_heads("queries", config, parallel)
            self.k_norm = norm_of_all_heads("keys", config, parallel)
        self.scale, self.cap = config.query_scale, config.attention_cap
        self.low_rank: LowRank | None = None  # of q, k and v

    def forward(self, x: Tensor, turns: Turns, context: AttentionContext, *, again: Again | None = None) -> Tensor:
        """Computes attention: x [..., D] -> [..., D].

        turns: of all tokens, from `Transformer.rotations`.
        again: see `LowRank`.
        """
        fast = context.cached
        if context.packed:
            x = gather_tokens(x, group=self.group)
        joined = context.joined
        parts = together(x, self, self.together) if joined is None else (product(x, *joined[self]),)
        if self.low_rank is not None:
            again = again if self.group is None else None
            parts = self.low_rank(x, *parts, again=again, dropout=context.dropout)
        if len(parts) == 1:
            parts = parts[0].split(self.sizes, dim=-1)
        if self.qk_norm_of_all:
            q, k, v = parts
            parts = self.q_norm(q, fast=fast), self.k_norm(k, fast=fast), v
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        if self.qk_norm and not self.qk_norm_of_all:
            q, k = self.q_norm(q, fast=fast), self.k_norm(k, fast=fast)
        if self.rope is not None:
            q, k, v = turned(q, k, v, *turns[self.rope], **self.turns, packed=context.packed, fast=fast)
        mixed = context.attend(self.layer, scaled(q, self.scale), k, v, self.window, self.cap)
        return self.o_proj(mixed.flatten(-2), packed=context.packed, dropout=context.dropout)


class MLP(nn.Module):
    """An MLP, in most models gated: SwiGLU (arXiv:2002.05202)."""

    alone = ("down_proj",)

    def __init__(self, config: ModelConfig, layer: int, parallel: Parallel):
        super().__init__()
        self.layer, self.group = layer, parallel.group
        inner = len(extent(config, "intermediate", parallel.shard))
        self.together = ("up_proj",) if config.plain_mlp else ("gate_proj", "up_proj")
        for name in self.together:
            self.add_module(name, Linear(config.hidden_size, inner, bias=config.mlp_bias))
        self.down_proj = RowLinear(inner, config.hidden_size, bias=config.mlp_bias, group=self.group)
        self.steps = steps(config.activation, plain=config.plain_mlp)
        self.low_rank: LowRank | None = None  # of gate and up

    def forward(self, x: Tensor, context: AttentionContext, *, again: Again | None = None) -> Tensor:
        """Computes the MLP: x [..., D] -> [..., D].

        again: see `LowRank`.
        """
        if context.packed:
            x = gather_tokens(x, group=self.group)
        joined = context.joined
        parts = together(x, self, self.together) if joined is None else (product(x, *joined[self]),)
        if self.low_rank is not None:
            again = again if self.group is None else None
            parts = self.low_rank(x, *parts, again=again, dropout=context.dropout)
        if len(parts) == 1:
            parts = parts[0].chunk(len(self.together), dim=-1)
        forward_only, step = self.steps
        inner = (forward_only if context.cached else step)(*parts)
        return self.down_proj(inner, packed=context.packed, again=(step, parts), dropout=context.dropout)


class Layer(nn.Module):
    """Attention, then MLP or beside it, each added to the residual stream, with norms before or after them
    (plan/norms.py)."""

    def __init__(self, config: ModelConfig, layer: int, parallel: Parallel):
        super().__init__()
        first, *others = self.norms = NORMS[config.norms]
        made = {name: make_norm(config.hidden_size, config) for name in filter(None, self.norms)}
        if first is not None:
            self.add_module(first, made[first])
        self.self_attn = Attention(config, layer, parallel)
        for name in filter(None, others):
            self.add_module(name, made[name])
        is_sparse = config.num_experts and layer >= config.num_dense_layers
        self.mlp = (SparseMLP if is_sparse else MLP)(config, layer, parallel)
        self.scale, self.is_parallel = config.residual_scale, config.parallel_residual

    def forward(
        self, x: Tensor, turns: Turns, context: AttentionContext, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Computes one layer of x + residual [..., D] -> x and a residual; None, if the sum is computed. On GPUs the
        norm that reads the sum computes it."""
        before, after, before_mlp, after_mlp = (None if name is None else getattr(self, name) for name in self.norms)
        fast = context.cached
        normed, x = normed_sum(before, x, residual, fast=fast)
        mixed = self.added(self.self_attn(normed, turns, context, again=before and (before, (x,))), after, fast=fast)
        normed, x = normed_sum(before_mlp, *((x, None) if self.is_parallel else (mixed, x)), fast=fast)
        y = self.mlp(normed, context, again=before_mlp and (before_mlp, (x,)))
        y = self.added(y, after_mlp, fast=fast)
        y = y + mixed if self.is_parallel else y
        return (y, x) if fused(x) else (x + y, None)

    def added(self, y: Tensor, norm: Norm | None, *, fast: bool) -> Tensor:
        """Returns what a block with the output y adds to the residual stream."""
        return scaled(y if norm is None else norm(y, fast=fast), self.scale)


def scaled(x: Tensor, scale: float) -> Tensor:
    """Returns x * scale; x itself if that is 1."""
    return x if scale == 1.0 else x * scale


def _message(direction: Callable, tensor: Tensor, peer: int, group: Group) -> None:
    """Sends or receives a tensor and waits for it; batched, as the messages that have connected the ranks."""
    for work in dist.batch_isend_irecv([dist.P2POp(direction, tensor, peer, group=group)]):
        work.wait()


class Transformer(nn.Module):
    """A causal language model (head "lm") or a critic / reward model (head "scalar", one number per token), or one
    shard of it: a stage's layers, with embed_tokens on the first stage, norm and head on the last.

    With device="meta" it holds no memory until it takes weights (`take`); otherwise it starts from
    `init_weights(seed)`. It never reads torch's global random state. recompute: training saves only each layer's input
    and recomputes the layer in the backward pass (arXiv 1604.06174), with the same bits. adapters: of its linear
    layers, which then train alone, with a scalar head; they, and that head, are at least float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        head: Head,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
        parallel: Parallel = WHOLE,
        recompute: bool = False,
        adapters: Adapters | None = None,
    ):
        super().__init__()
        shard = parallel.shard
        assert shard.tp <= min(config.num_kv_heads, config.intermediate_size, config.vocab_size), shard
        assert config.num_experts % shard.tp == 0 and config.num_experts <= MOST_EXPERTS, (config.num_experts, shard)
        assert adapters is None or not config.num_experts, "mixtures have no adapters"
        assert shard.pp <= config.num_layers, shard
        self.config, self.head, self.parallel, self.recompute = config, head, parallel, recompute
        self.adapters = adapters
        self.kept: object = None  # of generation: see Copies
        self.ropes = Ropes(config)
        unembeds = parallel.is_last and head == "lm"
        vocabulary = vocabulary_of(config, shard)
        with torch.device("meta"):
            if parallel.is_first or (unembeds and config.tie_embeddings):
                self.embed_tokens = Embedding(vocabulary, config.hidden_size, parallel.group)
            if parallel.is_first and config.num_positions:
                self.embed_positions = nn.Embedding(config.num_positions, config.hidden_size)
            layers = layers_of(config, shard)
            self.layers = nn.ModuleDict({str(layer): Layer(config, layer, parallel) for layer in layers})
            if parallel.is_last:
                self.norm = make_norm(config.hidden_size, config)
                if head == "scalar":
                    self.score = nn.Linear(config.hidden_size, 1, bias=False)
            if unembeds and not config.tie_embeddings:
                self.lm_head = Embedding(vocabulary, config.hidden_size, parallel.group)
        self.to(dtype)
        if adapters is not None:
            self._adapt(adapters, torch.promote_types(dtype, torch.float32))
        if torch.device(device).type != "meta":
            # not to_empty(): it makes torch import sympy, half a second
            empty = {n: torch.empty(one.shape, dtype=one.dtype, device=device) for n, one in self.named_parameters()}
            self.take(empty)
            self.init_weights(seed)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def take(self, weights: dict[str, Tensor]) -> None:
        """Makes these tensors its weights, by name; those that are multiplied with the same input become adjacent."""
        self.load_state_dict(weights, assign=True)
        lay_adjacent(self.layers.values())

    def _adapt(self, adapters: Adapters, dtype: torch.dtype) -> None:
        """Gives linear layers adapters, without memory."""
        for block in (block for layer in self.layers.values() for block in (layer.self_attn, layer.mlp)):
            for name, module in [*block.named_children()]:
                if isinstance(module, nn.Linear) and adapters.has(name):
                    sizes, bias = (module.in_features, module.out_features), module.bias is not None
                    with torch.device("meta"):
                        made = AdaptedLinear(*sizes, bias=bias)
                        if isinstance(module, RowLinear):
                            made = AdaptedRowLinear(*sizes, bias=bias, group=module.group)
                            what = "queries" if name == "o_proj" else "intermediate"
                            features = extent(self.config, what, self.parallel.shard)
                            made.low_rank = LowRank([made], [site(block.layer, name)], features)
                        made.to(self.dtype).adapt(adapters, dtype)
                    setattr(block, name, made)
            layers = [getattr(block, name) for name in block.together]
            sites = [site(block.layer, name) for name in block.together if adapters.has(name)]
            if sites:
                block.low_rank = LowRank(layers, sites, range(self.config.hidden_size))
        if self.parallel.is_last and self.head == "scalar":
            self.score.to(dtype)

    def with_adapters(
        self,
        adapters: Adapters | None,
        seed: int = 0,
        *,
        parallel: Parallel | None = None,
        head: Head | None = None,
    ) -> "Transformer":
        """Returns a model that shares the weights of this one and has adapters (None: has none), whose scalar head is
        its own. B is zero, so it computes what this one does.

        parallel: with the same shard.
        head: another one (None: this one's); a scalar head that this model lacks begins at zero.
        """
        parallel, head = parallel or self.parallel, head or self.head
        assert parallel.shard == self.parallel.shard, (parallel.shard, self.parallel.shard)
        options: dict[str, Any] = {"dtype": self.dtype, "device": "meta", "parallel": parallel, "adapters": adapters}
        made = Transformer(self.config, head=head, **options)
        weights, device = self.state_dict(), next(self.parameters()).device
        own = made.trained_names() if adapters is not None else set()
        taken: dict[str, Tensor] = {}
        for name, like in made.named_parameters():
            if name not in weights:
                taken[name] = torch.zeros(like.shape, dtype=like.dtype, device=device)
            else:
                taken[name] = weights[name].to(like.dtype, copy=True) if name in own else weights[name]
        assert head == "scalar" or self.head == "lm" or not parallel.is_last, "the output layer is there"
        made.load_state_dict(taken, assign=True)
        if adapters is not None:
            made.init_adapters(seed)
        return made.requires_grad_(False)

    def trained_names(self) -> set[str]:
        """Returns the parameters that training changes: all, or with adapters these, and a scalar head."""
        names = {name for name, _ in self.named_parameters()}
        return names if self.adapters is None else {one for one in names if is_factor(one) or one == "score.weight"}

    @torch.no_grad()
    def init_adapters(self, seed: int) -> None:
        """Draws A from Kaiming's uniform distribution with a = sqrt(5), of the whole model: +-1 / sqrt(inputs); B is 0.
        Each has random numbers of its own, so that they depend neither on the other targets nor on the shard."""
        wide = Transformer(self.config, head=self.head, device="meta", adapters=self.adapters)
        shapes = {name: like.shape for name, like in wide.named_parameters()}
        for name, factor in self.named_parameters():
            if not is_factor(name):
                continue
            if not name.endswith(A):
                factor.zero_()
                continue
            own = hashlib.sha256(f"{seed} {name}".encode()).digest()[:8]
            generator = torch.Generator().manual_seed(int.from_bytes(own, "little") >> 1)
            drawn = (torch.rand(shapes[name], generator=generator) * 2 - 1) / math.sqrt(shapes[name][1])
            factor.copy_(drawn[slice_of(name, self.config, self.parallel.shard)])

    @torch.no_grad()
    def init_weights(self, seed: int, *, std: float = 0.02, score_std: float = 0.0) -> None:
        """Draws weights as GPT-2 does: normal(0, std), divided by sqrt(2 * layers) for projections into the residual
        stream; norms 1 or, with an offset, 0; biases 0, the score head normal(0, score_std). The same seed gives the
        same weights on every device, and on every shard its part of the same model."""
        generator = torch.Generator().manual_seed(seed)
        shard, mine = self.parallel.shard, dict(self.named_parameters())
        whole = self if shard == Shard() else Transformer(self.config, head=self.head, device="meta")
        if self.adapters is not None:
            self.init_adapters(seed)
        for name, like in whole.named_parameters():
            if is_factor(name):
                continue
            if name.endswith("norm.weight") or name.endswith(".bias"):
                if name in mine:
                    mine[name].fill_(float(name.endswith("norm.weight") and not self.config.norm_offset))
                continue
            scale = std
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                scale = std / math.sqrt(2 * self.config.num_layers)
            elif name == "score.weight":
                scale = score_std
            drawn = torch.randn(like.shape, generator=generator) * scale
            if name in mine:
                mine[name].copy_(drawn[slice_of(name, self.config, shard)])

    def forward(
        self, tokens: Tensor | None, *, context: AttentionContext | None = None, hidden: Tensor | None = None
    ) -> Tensor:
        """Runs this stage on tokens int64 [B, T] (negative: padding, on the right) or, in a packed context, [N].

        context: see attention.py; None: rows without a cache.
        hidden: the output of the previous stage; None on the first stage, the only one that reads the tokens.

        Returns this stage's output [..., D], after the final norm on the last stage; in a packed context, this tp
        rank's share of the tokens (see `output_shape`). Do not train with Padded rows under tp: gradients would lack
        the other ranks' parts. Raises UserError if `dynamic` rope is used with a cache beyond the trained length:
        stored keys would be stale.
        """
        if context is None:
            rows = tokens if hidden is None else hidden
            assert rows is not None, "tokens or the output of a stage"
            context = Padded(rows.shape[1], rows.device)
        assert context.packed or self.parallel.group is None or not torch.is_grad_enabled(), "train packed sequences"
        x, residual = self.embedded(tokens, context, hidden), None
        turns = self.rotations(context, x.dtype)
        for layer in self.layers.values():
            if self.recompute and torch.is_grad_enabled():
                x = sum_of(*checkpoint(layer, x, turns, context, use_reentrant=False, preserve_rng_state=False))
            else:
                x, residual = layer(x, turns, context, residual)
        if not self.parallel.is_last:
            return sum_of(x, residual)
        return normed_sum(self.norm, x, residual, fast=context.cached)[0]

    def embedded(self, tokens: Tensor | None, context: AttentionContext, hidden: Tensor | None = None) -> Tensor:
        """Returns what the first layer of this stage reads."""
        if not self.parallel.is_first:
            return hidden
        assert tokens is not None and hidden is None, "the first stage begins with tokens"
        if context.packed:
            tokens = F.pad(tokens, (0, len(context.positions) - len(tokens)))
        x = self.embed_tokens(tokens.clamp_min(0), packed=context.packed)
        if self.config.scales_embeddings:
            x = x * torch.tensor(self.config.hidden_size**0.5).to(x.dtype)
        x = scaled(x, self.config.embedding_scale)
        if not self.config.num_positions:
            return x
        places = context.positions + (self.config.num_positions - self.config.max_position_embeddings)
        if context.packed:
            places = places.chunk(self.parallel.shard.tp)[self.parallel.shard.tp_index]
        return x + self.embed_positions(places)

    def rotations(self, context: AttentionContext, dtype: torch.dtype) -> Turns:
        """Returns what turns all tokens, for the layers."""
        return self.ropes(context.positions, dtype, cached=context.cached)

    def besides_layers(self) -> list[nn.Module]:
        """Returns the modules with weights that are not layers: embedding, final norm, head."""
        return [module for name, module in self.named_children() if name != "layers"]

    def padded(self, num_tokens: int) -> int:
        """Returns the number N of tokens of a packed pass, including padding: a multiple of the tp ranks."""
        return -(-rows_for(num_tokens, self.dtype) // self.parallel.shard.tp) * self.parallel.shard.tp

    def output_shape(self, num_tokens: int) -> tuple[int, int]:
        """Returns the shape [n, D] of a stage's output for packed tokens: its share of them, including padding."""
        return self.padded(num_tokens) // self.parallel.shard.tp, self.config.hidden_size

    def through_stages(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        """Receives from the previous stage, runs this one, sends to the next -> this stage's output. Collective over
        the ranks of one copy."""
        parallel, hidden = self.parallel, None
        if parallel.previous is not None:
            shape = self.output_shape(len(tokens)) if context.packed else (len(tokens), self.config.hidden_size)
            hidden = torch.empty(shape, dtype=self.dtype, device=tokens.device)
            _message(dist.irecv, hidden, parallel.previous, parallel.stages)
        hidden = self(tokens, context=context, hidden=hidden)
        if parallel.next is not None:
            _message(dist.isend, hidden.contiguous(), parallel.next, parallel.stages)
        return hidden

    def logits(self, hidden: Tensor, *, head: Callable = product) -> Tensor:
        """Computes logits [..., V] of the next token from hidden [..., D], over this rank's slice of the vocabulary; or
        the result of another head(hidden, weight_VD), such as token_logprobs, which never holds all logits; it caps
        them itself.

        Gather a packed output first (`gather_tokens`): every slice of the vocabulary reads all tokens.
        """
        assert self.head == "lm", self.head
        unembedding = self.embed_tokens if self.config.tie_embeddings else self.lm_head
        made = unembedding(scaled(hidden, 1 / self.config.logits_scale), head=head)
        return capped(made, self.config.logits_cap) if head is product else made

    def scalar(self, hidden: Tensor) -> Tensor:
        """Computes one number per token [...] from hidden [..., D]; those of a packed output need `collect_tokens`."""
        assert self.head == "scalar", self.head
        return self.score(hidden.to(self.score.weight.dtype)).squeeze(-1)
