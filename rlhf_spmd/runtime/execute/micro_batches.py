"""How the rows of a rank are cut into micro-batches: by number, or by a budget of tokens.

Every pass over the same rows in layouts with the same limits is cut alike, so that a recomputed logprob has the same
shapes, and hence the same bits, as the one that training computes first.
"""

from collections.abc import Sequence

from torch import Tensor

from rlhf_spmd.plan.layout import Layout


def lengths_of(prompts_BP: Tensor, responses_BG: Tensor) -> list[int]:
    """Tokens of each row; both are padded with -1."""
    return ((prompts_BP >= 0).sum(1) + (responses_BG >= 0).sum(1)).tolist()


def cut(lengths: Sequence[int], layout: Layout, micro_batch: int) -> list[slice]:
    """Consecutive rows of at most layout.tokens tokens together, or at most micro_batch rows; at least one row each."""
    if layout.tokens is None:
        return [slice(start, min(start + micro_batch, len(lengths))) for start in range(0, len(lengths), micro_batch)]
    parts: list[slice] = []
    start = held = 0
    for row, length in enumerate(lengths):
        if row > start and held + length > layout.tokens:
            parts.append(slice(start, row))
            start, held = row, 0
        held += length
    return parts + ([slice(start, len(lengths))] if lengths else [])
