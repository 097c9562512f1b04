"""Attention within sequences. A context defines the position of every token and which tokens a query may see.

There are two layouts. Rows are left-aligned and padded on the right, so causal attention needs no mask: no real token
sees padding. Packed sequences are concatenated without padding. Attention over a KV cache is in kv_attention.py.
"""

# B sequences, T current tokens, N tokens of packed sequences, H heads, K key-value heads, d head_dim;
# heads are those of this rank's slice

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlhf_spmd.kernels.dropout import Dropout
from rlhf_spmd.kernels.soft_cap import capped_attention
from rlhf_spmd.model.linear import Joined
from rlhf_spmd.model.routes import Routes

CAPPED_BYTES = 64 * 2**20  # of scores with a cap that exist at a time, counted as float32


class AttentionContext(Protocol):
    """The positions of the current tokens and what they attend to; token dims are [B, T], [B] or, if packed, [N]."""

    packed: ClassVar[bool]
    cached: ClassVar[bool]  # whether keys are stored for later tokens

    @property
    def joined(self) -> Joined | None:
        """Matrices to use instead of the layers' own, if any."""

    @property
    def dropout(self) -> Dropout | None:
        """Dropout of what adapters read, if any."""

    @property
    def routes(self) -> Routes | None:
        """Where the layers of a mixture record, or are given, the experts of each token, if anywhere."""

    @property
    def positions(self) -> Tensor:
        """int64, broadcasts over the token dims."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, cap: float | None = None
    ) -> Tensor:
        """Computes attention of the current tokens: q [..., H, d], k and v [..., K, d] -> [..., H, d].

        cap: of scores (kernels/soft_cap.py), if any.
        """


class Padded:
    """Tokens [B, T], one sequence per row, from position 0, padded on the right."""

    packed: ClassVar[bool] = False
    cached: ClassVar[bool] = False
    joined: ClassVar[None] = None
    dropout: ClassVar[None] = None

    def __init__(self, num_tokens: int, device: torch.device):
        """num_tokens: of each row, including padding."""
        self.routes: Routes | None = None
        self.positions = torch.arange(num_tokens, device=device)[None]  # [1, T]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, cap: float | None = None
    ) -> Tensor:
        return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), window, cap).transpose(1, 2)


class Packed:
    """Tokens [N] of several concatenated sequences; each attends to itself only and starts at position 0."""

    packed: ClassVar[bool] = True
    cached: ClassVar[bool] = False
    joined: ClassVar[None] = None

    def __init__(self, lengths: Sequence[int], *, device: torch.device | str = "cpu", num_tokens: int = 0):
        """lengths: at least 1 each. num_tokens: a last sequence of padding fills N up to this number."""
        filling = max(num_tokens - sum(lengths), 0)
        self.lengths = [*lengths, filling] if filling else list(lengths)
        self.num_tokens = sum(self.lengths)
        lengths_B = torch.tensor(self.lengths)
        ends_B = lengths_B.cumsum(0)
        starts_N = (ends_B - lengths_B).repeat_interleave(lengths_B, output_size=self.num_tokens)
        self.positions = (torch.arange(self.num_tokens) - starts_N).to(device)
        self.dropout: Dropout | None = None
        self.routes: Routes | None = None
        self._cuts_B1 = torch.cat((ends_B.new_zeros(1), ends_B)).int().to(device)
        # adjacent sequences of equal length share a call: (rows, length of each)
        self._runs = [(len(list(run)), length) for length, run in itertools.groupby(self.lengths)]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, cap: float | None = None
    ) -> Tensor:
        """Computes attention without a packed kernel: sequence by sequence. On a CPU this is faster than padding from 4
        rows of 30 tokens on."""
        if cap is None and has_packed_kernel(q):
            left = -1 if window is None else window - 1
            cuts, longest = self._cuts_B1, max(self.lengths)
            found = _varlen_attn()
            assert found is not None  # has_packed_kernel
            kernel, options = found
            if "enable_gqa" in options:
                grouped = {"enable_gqa": q.shape[1] > k.shape[1]}
            else:  # torch 2.11: as many key-value heads as heads
                grouped, group = {}, q.shape[1] // k.shape[1]
                k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
            return kernel(q, k, v, cuts, cuts, longest, longest, window_size=(left, 0), **grouped)
        outputs, sizes = [], [rows * length for rows, length in self._runs]
        for *parts, run in zip(q.split(sizes), k.split(sizes), v.split(sizes), self._runs, strict=True):
            q_BHTd, k_BKTd, v_BKTd = (part.unflatten(0, run).transpose(1, 2) for part in parts)
            outputs.append(attend(q_BHTd, k_BKTd, v_BKTd, window, cap).transpose(1, 2).flatten(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def has_packed_kernel(q_NHd: Tensor) -> bool:
    """Returns whether torch's kernel for packed sequences supports these: flash attention, so half precision on a
    GPU."""
    fits = q_NHd.dtype.itemsize == 2 and q_NHd.shape[2] % 8 == 0 and q_NHd.shape[2] <= 256
    if q_NHd.device.type != "cuda" or not fits or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(q_NHd.device) >= (8, 0) and _varlen_attn() is not None


@functools.cache
def _varlen_attn() -> tuple[Callable[..., Tensor], frozenset[str]] | None:
    """Returns torch's kernel for packed sequences and the names of its options; None if it supports no windows. Called
    on a GPU only, because the import takes a second, a third of a rank's start."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # old torch
        return None
    options = frozenset(inspect.signature(varlen_attn).parameters)
    return (varlen_attn, options) if "window_size" in options else None


def attend(
    q_BHTd: Tensor, k_BKTd: Tensor, v_BKTd: Tensor, window: int | None = None, cap: float | None = None
) -> Tensor:
    """Returns causal softmax(q k^T / sqrt(d)) v -> out_BHTd; query head h reads key-value head h // (H / K).

    window: number of tokens that each query sees, including its own.
    cap: of scores, if any.
    """
    if cap is not None:
        return attend_capped(q_BHTd, k_BKTd, v_BKTd, window, cap)
    num_tokens, group = q_BHTd.shape[2], q_BHTd.shape[1] // k_BKTd.shape[1]
    mask_TT = None
    if window is not None and num_tokens > window:
        mask_TT = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=q_BHTd.device).tril().triu(1 - window)
    causal = mask_TT is None and num_tokens > 1
    if group > 1 and not reads_groups(q_BHTd, masked=mask_TT is not None):
        k_BKTd, v_BKTd, group = k_BKTd.repeat_interleave(group, 1), v_BKTd.repeat_interleave(group, 1), 1
    return F.scaled_dot_product_attention(
        q_BHTd, k_BKTd, v_BKTd, attn_mask=mask_TT, is_causal=causal, enable_gqa=group > 1
    )


def attend_capped(q_BHtd: Tensor, k_BKTd: Tensor, v_BKTd: Tensor, window: int | None, cap: float) -> Tensor:
    """Returns causal attention of the last t of T tokens, with a cap on scores, in blocks of queries: scores of one
    block exist at a time, and the backward pass computes them again."""
    (num_rows, num_heads, num_queries, _), num_tokens = q_BHtd.shape, k_BKTd.shape[2]
    size = max(CAPPED_BYTES // (4 * max(num_rows * num_heads * num_tokens, 1)), 1)
    run: Callable[..., Tensor] = capped_attention
    if torch.is_grad_enabled():
        run = functools.partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
    at_T, window, outputs = torch.arange(num_tokens, device=q_BHtd.device), window or num_tokens, []
    start = num_tokens - num_queries
    for q_BHrd in q_BHtd.split(size, 2):
        stop = start + q_BHrd.shape[2]
        seen, at_r1 = slice(max(start + 1 - window, 0), stop), at_T[start:stop, None]
        visible_rT = (at_T[seen] <= at_r1) & (at_T[seen] > at_r1 - window)
        outputs.append(run(q_BHrd, k_BKTd[:, :, seen], v_BKTd[:, :, seen], visible_rT, cap))
        start = stop
    return torch.cat(outputs, 2)


def reads_groups(q_BHTd: Tensor, *, masked: bool) -> bool:
    """Returns whether a kernel reads grouped heads in place: on a CPU, and flash attention on a GPU (half precision, no
    mask). Otherwise torch would materialise the T x T matrix, which repeating keys and values avoids."""
    return q_BHTd.device.type == "cpu" or (q_BHTd.dtype.itemsize == 2 and not masked)
