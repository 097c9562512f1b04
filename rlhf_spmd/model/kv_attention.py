"""Attention over a paged KV cache: the context of a generation round, with prompts and new tokens."""

# B rows, N tokens of packed sequences, H heads, K key-value heads, d head_dim, n blocks of s tokens

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from rlhf_spmd.kernels.decode_attention import Decode, decode_attention
from rlhf_spmd.kernels.kv_write import heads_of, kv_write
from rlhf_spmd.model.attention import Packed
from rlhf_spmd.model.linear import Joined


class Cache(Protocol):
    """The interface of a KV cache (runtime/generation/kv_cache.py)."""

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """keys_nKsd, values_nKsd of a layer, given its number in the whole model."""


class Prefill(Packed):
    """The prompts of a Round: packed sequences from position 0, whose keys and values are stored."""

    def __init__(self, lengths: Sequence[int], cache: Cache, slots_N: Tensor):
        """slots_N: the slot of each token, int64 (block * s + offset)."""
        super().__init__(lengths, device=slots_N.device)
        self._cache, self._slots_N = cache, slots_N

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        kv_write(k, v, *self._cache.layer(layer), self._slots_N)
        return super().attend(layer, q, k, v, window)


class DecodeStep:
    """The new tokens [B] of a Round, one per row: each is stored and attends to all tokens of its row."""

    def __init__(self, cache: Cache, positions_B: Tensor, slots_B: Tensor, decode: Decode):
        """positions_B: number of tokens before the new one. slots_B: its slot. decode: shared by all layers."""
        self.positions, self.slots_B, self._cache, self._decode = positions_B, slots_B, cache, decode
        self._heads: Tensor | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        keys_nKsd, values_nKsd = self._cache.layer(layer)
        if self._heads is None:
            self._heads = heads_of(self.slots_B, keys_nKsd)
        kv_write(k, v, keys_nKsd, values_nKsd, self.slots_B, self._heads)
        return decode_attention(q, keys_nKsd, values_nKsd, self._decode, window=window)


class Round:
    """The context of one generation pass: first a new token per running row, then the prompts of new rows; either may
    be missing. All matrix products take both together; only attention separates them."""

    packed: ClassVar[bool] = False
    cached: ClassVar[bool] = True

    def __init__(self, step: DecodeStep | None, prefill: Prefill | None, joined: Joined | None = None):
        self.joined = joined
        self._parts = [part for part in (step, prefill) if part is not None]
        self._sizes = [len(part.positions) for part in self._parts]
        self.positions = torch.cat([part.positions for part in self._parts])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        if len(self._parts) == 1:
            return self._parts[0].attend(layer, q, k, v, window)
        cuts = [x.split(self._sizes) for x in (q, k, v)]
        return torch.cat([part.attend(layer, *qkv, window) for part, *qkv in zip(self._parts, *cuts, strict=True)])
