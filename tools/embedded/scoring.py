"""A reward model's scores of texts: their computation, their scale and how often they are right."""

# B sequences, N tokens of all, T tokens, D hidden

import random

import torch
from torch import Tensor

from rlhf_spmd.model.transformer import Transformer
from tools.embedded import grammar


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


@torch.no_grad()
def standardise(model: Transformer, tokens_BT: Tensor) -> None:
    """Changes the score head so that the scores of these rows have mean 0 and standard deviation 1.

    The head has no bias, so the mean is moved along the direction in which the hidden states are most nearly constant:
    d = argmin |H d - 1|^2 over all tokens.
    """
    hidden_BTD = model(tokens_BT).double()
    every_ND, last_BD = hidden_BTD[tokens_BT >= 0], at_last(hidden_BTD, tokens_BT)
    ridge_DD = 1e-6 * len(every_ND) * torch.eye(every_ND.shape[1], dtype=torch.float64)
    constant_D = torch.linalg.solve(every_ND.T @ every_ND + ridge_DD, every_ND.sum(0))
    mean_D, head_D = last_BD.mean(0), model.score.weight[0].double()
    head_D = head_D - (mean_D @ head_D) / (mean_D @ constant_D) * constant_D
    model.score.weight[0] = (head_D / (last_BD @ head_D).std()).to(model.score.weight.dtype)


def accuracy(model: Transformer, tokenizer, rng: random.Random, num_pairs: int = 1000, margin: float = 0.1) -> float:
    """Returns the share of fresh pairs, with scores more than `margin` apart, that the reward model ranks like the
    grammar."""
    better, worse = [], []
    while len(better) < num_pairs:
        start = grammar.opening(rng)
        a, b = sorted((grammar.continuation(rng, start) for _ in range(2)), key=grammar.score)
        if grammar.score(b) - grammar.score(a) > margin:
            better.append(encode(tokenizer, start.text, b))
            worse.append(encode(tokenizer, start.text, a))
    with torch.no_grad():
        return (score_rows(model, pad_rows(better)) > score_rows(model, pad_rows(worse))).float().mean().item()
