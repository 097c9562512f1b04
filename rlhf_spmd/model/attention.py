"""Attention, and the contexts that say which tokens a query may see: rows with or without a KV cache, or packed.

A context also knows the position of every token. Rows are left-aligned with padding on the right, so that plain causal
attention needs no mask: padding never reaches a real token. Packed sequences lie end to end without any padding.
"""

# B sequences, T tokens at hand, S tokens to attend to, N tokens of packed sequences, H heads, K key-value heads,
# d head_dim; heads are those of this rank's slice

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # old torch
    varlen_attn = None
_VARLEN_FITS = (
    varlen_attn is not None and not {"window_size", "enable_gqa"} - inspect.signature(varlen_attn).parameters.keys()
)


class Cache(Protocol):
    """What attention asks of a KV cache (runtime/kvcache.py)."""

    def update(self, layer: int, keys_BKTd: Tensor, values_BKTd: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store the new tokens of a layer -> (keys_BKSd, values_BKSd, mask_B1TS or None).

        The slots of a row are in the order of its positions. mask: True = may attend. None: all S slots of every row
        are real and the T new ones come last (so a prefill of an empty cache, or a decode of equal lengths).
        """


class Context(Protocol):
    """Where the tokens at hand stand and what they attend to; the tokens' dims are [B, T] or, packed, [N]."""

    packed: ClassVar[bool]
    cache: Cache | None

    @property
    def positions(self) -> Tensor:
        """int64, broadcasts over the tokens' dims."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """q [..., H, d], k and v [..., K, d] of the tokens at hand -> [..., H, d]."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens [B, T], one sequence a row, alone or after those in a cache."""

    positions: Tensor  # [B or 1, T]
    cache: Cache | None = None
    packed: ClassVar[bool] = False

    @classmethod
    def first(cls, num_tokens: int, device: torch.device, cache: Cache | None = None) -> "Rows":
        """Rows that begin at position 0."""
        return cls(torch.arange(num_tokens, device=device)[None], cache)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        q_BHTd, k_BKSd, v_BKSd, mask_B1TS = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None
        if self.cache is not None:
            k_BKSd, v_BKSd, mask_B1TS = self.cache.update(layer, k_BKSd, v_BKSd)
        if window is not None and k_BKSd.shape[2] > window:
            mask_B1TS = windowed(mask_B1TS, window, q_BHTd.shape[2], k_BKSd)
        return attend(q_BHTd, k_BKSd, v_BKSd, mask_B1TS).transpose(1, 2)


class Packed:
    """Tokens [N] of several sequences laid end to end; each attends to itself only and starts at position 0."""

    packed: ClassVar[bool] = True
    cache: ClassVar[None] = None

    def __init__(self, lengths: Sequence[int], *, device: torch.device | str = "cpu", multiple: int = 1):
        """lengths: at least 1 each. multiple: fills N up to a multiple of this with a last sequence of padding."""
        filling = -sum(lengths) % multiple
        self.lengths = [*lengths, filling] if filling else list(lengths)
        self.num_tokens = sum(self.lengths)
        lengths_B = torch.tensor(self.lengths)
        ends_B = lengths_B.cumsum(0)
        starts_N = (ends_B - lengths_B).repeat_interleave(lengths_B, output_size=self.num_tokens)
        self.positions = (torch.arange(self.num_tokens) - starts_N).to(device)
        self._cuts_B1 = torch.cat((ends_B.new_zeros(1), ends_B)).int().to(device)
        # neighbours of equal length share a call: (rows, length of each)
        self._runs = [(len(list(run)), length) for length, run in itertools.groupby(self.lengths)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """Sequence by sequence: on a CPU that beats padding them, alike or by groups, from 4 rows of 30 tokens on."""
        if has_packed_kernel(q):
            left = -1 if window is None else window - 1
            cuts, longest = self._cuts_B1, max(self.lengths)
            return varlen_attn(
                q, k, v, cuts, cuts, longest, longest, window_size=(left, 0), enable_gqa=q.shape[1] > k.shape[1]
            )
        outputs, sizes = [], [rows * length for rows, length in self._runs]
        for *parts, run in zip(q.split(sizes), k.split(sizes), v.split(sizes), self._runs, strict=True):
            q_BHTd, k_BKTd, v_BKTd = (part.unflatten(0, run).transpose(1, 2) for part in parts)
            mask_11TT = None
            if window is not None and run[1] > window:
                mask_11TT = windowed(None, window, run[1], k_BKTd)
            outputs.append(attend(q_BHTd, k_BKTd, v_BKTd, mask_11TT).transpose(1, 2).flatten(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def has_packed_kernel(q_NHd: Tensor) -> bool:
    """Whether torch's kernel for packed sequences takes these: flash attention, so half precision on a GPU."""
    fits = _VARLEN_FITS and q_NHd.dtype.itemsize == 2 and q_NHd.shape[2] % 8 == 0 and q_NHd.shape[2] <= 256
    if q_NHd.device.type != "cuda" or not fits or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(q_NHd.device) >= (8, 0)


def attend(q_BHTd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, mask_B1TS: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v -> out_BHTd; H is a multiple of K, and query head h reads key-value head h // (H / K).

    Without a mask the T queries are the last of the S tokens and attention is causal.
    """
    batch, num_heads, num_new, head_dim = q_BHTd.shape
    num_kv_heads, num_keys = k_BKSd.shape[1:3]
    group = num_heads // num_kv_heads
    causal = mask_B1TS is None and num_new > 1
    if causal and num_new != num_keys:
        mask_B1TS, causal = causal_mask(num_new, num_keys, q_BHTd.device), False
    if group == 1 or reads_groups(q_BHTd, masked=mask_B1TS is not None):
        return F.scaled_dot_product_attention(
            q_BHTd, k_BKSd, v_BKSd, attn_mask=mask_B1TS, is_causal=causal, enable_gqa=group > 1
        )
    if num_new == 1:  # decoding: the heads of a group become queries of one head, and the cache is not copied
        q_BKgd = q_BHTd.reshape(batch, num_kv_heads, group, head_dim)
        return F.scaled_dot_product_attention(q_BKgd, k_BKSd, v_BKSd, attn_mask=mask_B1TS).reshape(q_BHTd.shape)
    k_BHSd, v_BHSd = k_BKSd.repeat_interleave(group, 1), v_BKSd.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(q_BHTd, k_BHSd, v_BHSd, attn_mask=mask_B1TS, is_causal=causal)


def reads_groups(q_BHTd: Tensor, *, masked: bool) -> bool:
    """Whether a kernel reads grouped heads in place: the CPU's, and the GPU's flash kernel (half precision, no mask).
    Elsewhere torch would fall back to writing out the T x S matrix, which repeating keys and values avoids."""
    return q_BHTd.device.type == "cpu" or (q_BHTd.dtype.itemsize == 2 and not masked)


def causal_mask(num_new: int, num_keys: int, device: torch.device) -> Tensor:
    """mask_11TS: the T queries are the last of S tokens; each sees itself and all before."""
    mask_TS = torch.ones(num_new, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_new)
    return mask_TS[None, None]


def windowed(mask_B1TS: Tensor | None, window: int, num_new: int, k_BKSd: Tensor) -> Tensor:
    """Keep the last `window` of the tokens that each query may see; mask_B1TS as in `attend`."""
    num_keys = k_BKSd.shape[2]
    if mask_B1TS is None:
        return causal_mask(num_new, num_keys, k_BKSd.device).triu(num_keys - num_new - window + 1)
    seen_B1TS = mask_B1TS.cumsum(-1)  # by count, not by slot, so that a cache may leave empty slots between
    return mask_B1TS & (seen_B1TS > seen_B1TS[..., -1:] - window)
