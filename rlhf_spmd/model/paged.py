"""Attention over a paged KV cache: the contexts of a prefill (packed prompts) and of a decode step."""

# B rows, N tokens of packed sequences, H heads, K key-value heads, d head_dim, n blocks of s tokens

from collections.abc import Sequence
from typing import ClassVar, Protocol

from torch import Tensor

from rlhf_spmd.kernels.decode_attention import Decode, decode_attention
from rlhf_spmd.kernels.kv_write import heads_of, kv_write
from rlhf_spmd.model.attention import Packed


class Cache(Protocol):
    """What attention asks of a KV cache (runtime/kvcache.py)."""

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """keys_nKsd, values_nKsd of a layer, by its number in the whole model."""


class Prefill(Packed):
    """Packed sequences that begin at position 0 and whose keys and values are stored."""

    cached: ClassVar[bool] = True

    def __init__(self, lengths: Sequence[int], cache: Cache, slots_N: Tensor, *, multiple: int = 1):
        """slots_N: where each token goes, int64 (block * s + offset)."""
        super().__init__(lengths, device=slots_N.device, multiple=multiple)
        self._cache, self._slots_N = cache, slots_N

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        num = len(self._slots_N)  # without what fills up the tokens for tp
        kv_write(k[:num], v[:num], *self._cache.layer(layer), self._slots_N)
        return super().attend(layer, q, k, v, window)


class DecodeStep:
    """One new token per row, [B]; it is stored, and attends to all tokens of its row."""

    packed: ClassVar[bool] = False
    cached: ClassVar[bool] = True

    def __init__(self, cache: Cache, positions_B: Tensor, slots_B: Tensor, decode: Decode):
        """positions_B: tokens before this one. slots_B: where it goes. decode: what all layers share."""
        self.positions, self._cache, self._slots_B, self._decode = positions_B, cache, slots_B, decode
        self._heads: Tensor | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        keys_nKsd, values_nKsd = self._cache.layer(layer)
        if self._heads is None and not k.is_cuda:
            self._heads = heads_of(self._slots_B, *keys_nKsd.shape[1:3])
        kv_write(k, v, keys_nKsd, values_nKsd, self._slots_B, self._heads)
        return decode_attention(q, keys_nKsd, values_nKsd, self._decode, window=window)
