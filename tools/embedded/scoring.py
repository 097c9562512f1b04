"""A reward model's scores of texts: their computation, their scale and how often they are right."""

# B sequences, N tokens of all, T tokens, D hidden

import torch
from torch import Tensor

from rlhf_spmd.model.transformer import Transformer


def encode(tokenizer, start: str, end: str) -> list[int]:
    """Returns token ids of opening + continuation, with the begin and end tokens."""
    return tokenizer.encode(start + end) + [tokenizer.eos_token_id]


def pad_rows(rows: list[list[int]]) -> Tensor:
    """Returns rows of unequal length as [B, T], padded on the right with -1."""
    width = max(map(len, rows))
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])


def at_last(x_BT: Tensor, tokens_BT: Tensor) -> Tensor:
    """Returns the values at each row's last real token, [B, ...]."""
    return x_BT[torch.arange(len(tokens_BT)), (tokens_BT >= 0).sum(1) - 1]


def score_rows(model: Transformer, tokens_BT: Tensor) -> Tensor:
    """Returns the reward model's score of each row, [B]."""
    return at_last(model.scalar(model(tokens_BT)), tokens_BT)
