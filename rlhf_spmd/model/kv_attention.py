"""Attention over a paged KV cache: the context of a generation round, with prompts and new tokens."""

# B rows, N tokens of packed sequences, T tokens of a row, of which t are new, H heads, K key-value heads, d head_dim,
# n blocks of s tokens

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_spmd.kernels.decode_attention import Decode, decode_attention
from rlhf_spmd.kernels.kv_write import heads_of, kv_write
from rlhf_spmd.model.attention import Packed, attend_capped, reads_groups
from rlhf_spmd.model.linear import Joined
from rlhf_spmd.model.routes import Routes


class Cache(Protocol):
    """The interface of a KV cache (runtime/generation/kv_cache.py)."""

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns keys_nKsd, values_nKsd of a layer, given its number in the whole model."""


class Prefill(Packed):
    """The prompts of a Round: packed sequences from position 0, whose keys and values are stored."""

    def __init__(self, lengths: Sequence[int], cache: Cache, slots_N: Tensor):
        """slots_N: the slot of each token, int64 (block * s + offset)."""
        super().__init__(lengths, device=slots_N.device)
        self._cache, self._slots_N = cache, slots_N

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, cap: float | None = None
    ) -> Tensor:
        kv_write(k, v, *self._cache.layer(layer), self._slots_N)
        return super().attend(layer, q, k, v, window, cap)


class Continued:
    """Further tokens of rows that are in the cache, row by row; each attends to the tokens of its row before it."""

    def __init__(self, lengths: Sequence[int], cache: Cache, slots: Sequence[Tensor]):
        """lengths: new tokens of each row. slots: of all tokens of each row, int64 (block * s + offset)."""
        self._lengths, self._cache, self._slots = list(lengths), cache, slots
        new = list(zip(lengths, slots, strict=True))
        self._slots_N = torch.cat([slots_T[-num:] for num, slots_T in new])
        spans = [torch.arange(len(slots_T) - num, len(slots_T)) for num, slots_T in new]
        self.positions = torch.cat(spans).to(self._slots_N.device)
        self._places: list[tuple[Tensor, Tensor]] = []  # block and place in it of all tokens of each row
        self._masks: dict[int | None, list[Tensor]] = {}  # window -> of each row, which tokens its new ones attend to

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, cap: float | None = None
    ) -> Tensor:
        keys_nKsd, values_nKsd = self._cache.layer(layer)
        kv_write(k, v, keys_nKsd, values_nKsd, self._slots_N)
        group, size, outputs = q.shape[1] // k.shape[1], keys_nKsd.shape[2], []
        self._places = self._places or [(slots_T // size, slots_T % size) for slots_T in self._slots]
        for q_tHd, (block_T, at_T), mask_tT in zip(
            q.split(self._lengths), self._places, self._masks_of(window), strict=True
        ):
            k_KTd, v_KTd = (x[block_T, :, at_T].transpose(0, 1) for x in (keys_nKsd, values_nKsd))
            if cap is not None:
                out_1Htd = attend_capped(q_tHd.transpose(0, 1)[None], k_KTd[None], v_KTd[None], window, cap)
                outputs.append(out_1Htd[0].transpose(0, 1))
                continue
            if repeats := group > 1 and not reads_groups(q, masked=True):
                k_KTd, v_KTd = (x.repeat_interleave(group, 0) for x in (k_KTd, v_KTd))
            out_Htd = F.scaled_dot_product_attention(
                q_tHd.transpose(0, 1)[None],
                k_KTd[None],
                v_KTd[None],
                attn_mask=mask_tT,
                enable_gqa=group > 1 and not repeats,
            )[0]
            outputs.append(out_Htd.transpose(0, 1))
        return torch.cat(outputs)

    def _masks_of(self, window: int | None) -> list[Tensor]:
        """Returns mask_tT of each row, made for the first layer with this window."""
        if window not in self._masks:
            masks = self._masks[window] = []
            for num, slots_T in zip(self._lengths, self._slots, strict=True):
                at_T = torch.arange(len(slots_T), device=slots_T.device)
                masks.append(at_T <= at_T[-num:, None])
                if window is not None:
                    masks[-1] &= at_T > at_T[-num:, None] - window
        return self._masks[window]


class DecodeStep:
    """The new tokens [B] of a Round, one per row: each is stored and attends to all tokens of its row."""

    def __init__(self, cache: Cache, positions_B: Tensor, slots_B: Tensor, decode: Decode):
        """Prepares a decode step for all layers.

        positions_B: number of tokens before the new one.
        slots_B: its slot.
        decode: shared by all layers.
        """
        self.positions, self.slots_B, self._cache, self._decode = positions_B, slots_B, cache, decode
        self._heads: Tensor | None = None

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, cap: float | None = None
    ) -> Tensor:
        keys_nKsd, values_nKsd = self._cache.layer(layer)
        if self._heads is None:
            self._heads = heads_of(self.slots_B, keys_nKsd)
        kv_write(k, v, keys_nKsd, values_nKsd, self.slots_B, self._heads)
        return decode_attention(q, keys_nKsd, values_nKsd, self._decode, window=window, cap=cap)


class Round:
    """The context of one generation pass: first a new token per running row, then further tokens of rows that have got
    an answer, then the prompts of new rows; any may be missing. All matrix products take them together; only attention
    separates them."""

    packed: ClassVar[bool] = False
    cached: ClassVar[bool] = True
    dropout: ClassVar[None] = None

    def __init__(
        self,
        step: DecodeStep | None,
        prefill: Prefill | None,
        joined: Joined | None = None,
        continued: Continued | None = None,
    ):
        self.joined = joined
        self.routes: Routes | None = None
        self._parts = [part for part in (step, continued, prefill) if part is not None]
        self._sizes = [len(part.positions) for part in self._parts]
        self.positions = torch.cat([part.positions for part in self._parts])

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, cap: float | None = None
    ) -> Tensor:
        if len(self._parts) == 1:
            return self._parts[0].attend(layer, q, k, v, window, cap)
        cuts = [x.split(self._sizes) for x in (q, k, v)]
        return torch.cat([part.attend(layer, *qkv, window, cap) for part, *qkv in zip(self._parts, *cuts, strict=True)])
