"""The table of a model's weights: their sizes, how tensor parallelism cuts them, which pipeline stages hold them.

The weights of one kind in all layers are one tensor [layers, rows, columns], of which a rank holds a few boxes. So a
plan for 80 layers is no longer than one for two.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from rlhf_spmd.plan.adapters import BY_OUTPUTS, A, B
from rlhf_spmd.plan.norms import NORMS
from rlhf_spmd.plan.shard import Shard, split
from rlhf_spmd.plan.workload import ModelShape

SCORE = "score.weight"  # the head of one number per token, which trains beside adapters
Range = tuple[int, int]  # first, last + 1
Box = tuple[Range, Range, Range]  # of layers, rows and columns, counted in the whole model


def box_of(ranges: Iterable[Range]) -> Box:
    """Returns the box of three ranges."""
    layers, rows, columns = ranges
    return layers, rows, columns


def numbers_in(box: Box) -> int:
    """Returns how many numbers a box holds."""
    (l0, l1), (r0, r1), (c0, c1) = box
    return (l1 - l0) * (r1 - r0) * (c1 - c0)


def overlap(a: Box, b: Box) -> Box | None:
    """Returns the intersection of two boxes of one tensor; None if it is empty."""
    common = box_of((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(first < last for first, last in common) else None


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one kind of weight; it is sent layer by layer, row by row."""

    weight: str
    box: Box

    @property
    def num_numbers(self) -> int:
        return numbers_in(self.box)


def rectangles(start: int, stop: int, *, width: int) -> list[tuple[Range, Range]]:
    """Yields (rows, columns) of the numbers [start, stop) of a matrix with rows of `width`: at most the end of a row,
    full rows, and the beginning of a row, in this order."""
    (r0, c0), (r1, c1) = divmod(start, width), divmod(stop, width)
    if r0 == r1:
        return [((r0, r0 + 1), (c0, c1))] if c0 < c1 else []
    full = r0 + (c0 > 0)  # the first full row
    parts = [((r0, full), (c0, width)), ((full, r1), (0, width)), ((r1, r1 + 1), (0, c1))]
    return [(rows, columns) for rows, columns in parts if rows[0] < rows[1] and columns[0] < columns[1]]


@dataclass(frozen=True, slots=True)
class Weight:
    """One kind of weight: [layers, rows, columns] of the whole model.

    name: of a parameter of model/transformer.py; `{}` stands for the layer. A parameter with one dim (num_dims 1) has
        one column.
    cut: the dim that tensor parallelism splits, in units of `unit` rows or columns; None: every slice holds all of it.
    stages: which pipeline stages hold it; "layers": each the part of its layers; "ends": first and last.
    only: the layers that have it, if not all do: sparse ones, or dense ones.
    """

    name: str
    layers: int
    rows: int
    columns: int
    num_dims: Literal[1, 2] = 2
    cut: Literal["rows", "columns"] | None = None
    unit: int = 1
    stages: Literal["layers", "first", "last", "ends"] = "layers"
    only: Range | None = None

    @property
    def whole(self) -> Box:
        return self.only or (0, self.layers), (0, self.rows), (0, self.columns)

    def box(self, shard: Shard) -> Box | None:
        """Returns the part that a shard holds; None if it holds nothing."""
        if self.stages == "layers":
            stage = split(self.layers, shard.pp, shard.stage)
            first, last = self.only or (0, self.layers)
            layers = max(first, stage.start), min(last, stage.stop)
        else:
            is_first, is_last = shard.stage == 0, shard.is_last
            layers = 0, int({"first": is_first, "last": is_last, "ends": is_first or is_last}[self.stages])
        rows = self._slice(self.rows, shard) if self.cut == "rows" else (0, self.rows)
        columns = self._slice(self.columns, shard) if self.cut == "columns" else (0, self.columns)
        box = layers, rows, columns
        return box if all(start < stop for start, stop in box) else None

    def _slice(self, size: int, shard: Shard) -> Range:
        units = split(size // self.unit, shard.tp, shard.tp_index)
        return units.start * self.unit, units.stop * self.unit

    def parameters(self, layers: Range) -> Iterator[tuple[int, str]]:
        """Yields (layer, parameter name) for these layers; a weight outside of the layers is in layer 0."""
        return ((layer, self.name.format(layer)) for layer in range(*layers))


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank holds of a model: a shard, or under ZeRO 3 one of `parts` parts of it.

    ZeRO 3 (in DeepSpeed's order): each parameter of the shard is flattened by itself, and part i has the numbers
    [i * n, (i + 1) * n) with n = ceil(size / parts); the last parts may be short or empty.
    """

    shard: Shard
    part: int = 0
    parts: int = 1

    def interval(self, box: Box) -> Range:
        """Returns the numbers of one flattened parameter that this rank has; `box`: the shard's part of the weight."""
        _, (r0, r1), (c0, c1) = box
        size = (r1 - r0) * (c1 - c0)
        step = -(-size // self.parts)
        return min(self.part * step, size), min((self.part + 1) * step, size)

    def boxes(self, weight: Weight) -> tuple[Box, ...]:
        """Returns this rank's part of a weight, at most three boxes: the end of a row, full rows, the beginning of a
        row."""
        box = weight.box(self.shard)
        if box is None or self.parts == 1:
            return () if box is None else (box,)
        layers, (top, _), (left, right) = box
        parts = rectangles(*self.interval(box), width=right - left)
        return tuple((layers, (a + top, b + top), (c + left, d + left)) for (a, b), (c, d) in parts)


@lru_cache(maxsize=64)
def weights_of(shape: ModelShape) -> tuple[Weight, ...]:
    """Returns all weights of a model, in the order of its parameters with all layers as one; without adapters."""
    num, hidden, inner, d = shape.num_layers, shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_heads * d, shape.num_kv_heads * d
    group = shape.num_heads // shape.num_kv_heads * d  # the query heads that read one key-value head stay together
    embedding_stages: Literal["ends", "first"] = "ends" if shape.tied and not shape.scalar_head else "first"
    table = [Weight("embed_tokens.weight", 1, shape.vocab_size, hidden, cut="rows", stages=embedding_stages)]

    if shape.num_positions:
        table.append(Weight("embed_positions.weight", 1, shape.num_positions, hidden, stages="first"))
    sparse = (shape.num_dense_layers, num) if shape.num_experts else None

    def norm(name: str | None, size: int) -> None:
        if name is not None:
            kinds = ("weight", "bias") if shape.layer_norm else ("weight",)
            table.extend(Weight(f"layers.{{}}.{name}.{kind}", num, size, 1, num_dims=1) for kind in kinds)

    def linear(name: str, rows: int, columns: int, cut: Literal["rows", "columns"], unit: int, bias: bool) -> None:
        table.append(Weight(f"layers.{{}}.{name}.weight", num, rows, columns, cut=cut, unit=unit))
        if bias:
            whole = Weight(f"layers.{{}}.{name}.bias", num, rows, 1, num_dims=1)  # which is added once, to the sum
            table.append(replace(whole, cut="rows", unit=unit) if cut == "rows" else whole)

    first, *others = NORMS[shape.norms]
    norm(first, hidden)
    linear("self_attn.q_proj", queries, hidden, "rows", group, shape.qkv_bias)
    linear("self_attn.k_proj", keys, hidden, "rows", d, shape.qkv_bias)
    linear("self_attn.v_proj", keys, hidden, "rows", d, shape.qkv_bias)
    linear("self_attn.o_proj", hidden, queries, "columns", group, shape.output_bias)
    if shape.qk_norm:
        norm("self_attn.q_norm", queries if shape.qk_norm_of_all else d)
        norm("self_attn.k_norm", keys if shape.qk_norm_of_all else d)
    for name in others:
        norm(name, hidden)
    num_common = len(table)
    if sparse is None or sparse[0]:
        if not shape.plain_mlp:
            linear("mlp.gate_proj", inner, hidden, "rows", 1, shape.mlp_bias)
        linear("mlp.up_proj", inner, hidden, "rows", 1, shape.mlp_bias)
        linear("mlp.down_proj", hidden, inner, "columns", 1, shape.mlp_bias)
    if sparse is not None:
        table[num_common:] = [replace(weight, only=(0, sparse[0])) for weight in table[num_common:]]
        table += _experts(shape, sparse)
    table.append(Weight("norm.weight", 1, hidden, 1, num_dims=1, stages="last"))
    if shape.layer_norm:
        table.append(Weight("norm.bias", 1, hidden, 1, num_dims=1, stages="last"))
    if shape.scalar_head:
        table.append(Weight(SCORE, 1, 1, hidden, stages="last"))
    elif not shape.tied:
        table.append(Weight("lm_head.weight", 1, shape.vocab_size, hidden, cut="rows", stages="last"))
    return tuple(table)


def _experts(shape: ModelShape, layers: Range) -> list[Weight]:
    """Returns the weights of mixtures: a router, which every slice holds, and the matrices of all experts one below the
    other, of which tensor parallelism cuts whole experts."""
    num, hidden, inner, experts = shape.num_layers, shape.hidden_size, shape.expert_size, shape.num_experts
    name = "layers.{}.mlp.experts."
    return [
        Weight("layers.{}.mlp.gate.weight", num, experts, hidden, only=layers),
        *(
            Weight(f"{name}{part}.weight", num, experts * rows, columns, cut="rows", unit=rows, only=layers)
            for part, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner))
        ),
    ]


@lru_cache(maxsize=64)
def trained_weights_of(shape: ModelShape) -> tuple[Weight, ...]:
    """Returns what training changes: all weights, or of a model with adapters these, and a head of one number per
    token."""
    adapters = shape.adapters
    if adapters is None:
        return weights_of(shape)
    table: list[Weight] = []
    for weight in weights_of(shape):
        layer = weight.name.removesuffix(".weight")
        if weight.name == SCORE:
            table.append(weight)
        if weight.num_dims == 1 or weight.cut is None or not adapters.has(layer):
            continue
        down, up = replace(weight, name=f"{layer}.{A}"), replace(weight, name=f"{layer}.{B}")
        if layer.rpartition(".")[2] in BY_OUTPUTS:
            down = replace(down, cut=None, unit=1)
        else:
            up = replace(up, cut=None, unit=1)
        table += [replace(down, rows=adapters.rank), replace(up, columns=adapters.rank)]
    return tuple(table)


@lru_cache(maxsize=64)
def frozen_weights_of(shape: ModelShape) -> tuple[Weight, ...]:
    """Returns the base of a model with adapters: its weights that training leaves as they are; of any other model
    none."""
    if shape.adapters is None:
        return ()
    return tuple(weight for weight in weights_of(shape) if weight.name != SCORE)
