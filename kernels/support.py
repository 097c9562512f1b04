"""The sampling support: the tokens that temperature, top-k, top-p and min-p allow, as a threshold on
z = logits / temperature.

    top-k   keeps  z_v >= the k-th largest z
    top-p   keeps  z_v if the tokens with a strictly larger z hold less than p of the mass that top-k left: the
            smallest set of the largest values that reaches p (Holtzman et al., arXiv 1904.09751)
    min-p   keeps  z_v - max z >= log(min_p), i.e. probability >= min_p x the largest (arXiv 2407.01082)
    limit   keeps  at most `limit` tokens, the largest; ties go to the lowest ids

applied in this order, as transformers' warpers do. Except at the limit, tokens of equal z are kept or dropped together
(transformers cuts ties at the edge of top-p in the order its sort leaves them in). The most likely token is always
kept, a banned one (-inf) never. Temperature 0 means limit 1 at temperature 1.

Legend: B sequences, V vocabulary, C candidates (the largest logits of a row), K stored tokens.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

FIRST_CANDIDATES = 256  # for a row without top-k; most nuclei are smaller
SPARE = 14  # candidates beyond top-k: room for ties, and one token below them that proves there are no more
GROUP = 16  # tokens per group; `largest` first compares the maxima of groups


class Sampled(NamedTuple):
    """One token per row. The numbers are float32 (float64 for float64 logits), and NaN where the logits of a row hold
    NaN or +inf, or only -inf; the caller's parity gate reports it. Even then the token is in range."""

    tokens_B: Tensor  # int64
    logprobs_B: Tensor  # under the distribution sampled from
    full_logprobs_B: Tensor  # under softmax(logits / temperature)
    support_mass_B: Tensor  # of the support under softmax(logits / temperature)
    support_BK: Tensor | None = None  # int32 ids, most likely first, ties by id, -1 after the last

    def put(self, rows_R: Tensor, part: "Sampled") -> None:
        """Writes the results of some rows."""
        for whole, rows in zip(self, part, strict=True):
            if whole is not None:
                whole[rows_R] = rows


class Rules(NamedTuple):
    """The rules of every row, including disabled ones. `z` below: float32, or float64 for float64 logits."""

    temperature_B: Tensor  # z; greedy rows have 1
    top_k_B: Tensor  # int64, V if off
    has_top_k_B: Tensor  # bool
    top_p_B: Tensor  # float64, 1 if off
    floor_B: Tensor  # z: log(min_p), -inf if off
    limit_B: Tensor  # int64, V if off; greedy rows have 1

    def rows(self, index: Tensor) -> "Rules":
        return Rules(*(rule_B[index] for rule_B in self))

    def restricted(self, vocab_size: int) -> Tensor:
        """Returns whether the rules may exclude tokens of a row: bool [B]."""
        return self.has_top_k_B | (self.limit_B < vocab_size) | (self.top_p_B < 1) | (self.floor_B > -torch.inf)


def make_rules(logits_BV: Tensor, temperature, top_k, top_p, min_p, num_stored: int) -> Rules:
    """Converts numbers or tensors [B] to Rules on the device of the logits."""
    values = temperature, top_k, top_p, min_p = tuple(
        x.item() if isinstance(x, Tensor) and not x.dim() else x for x in (temperature, top_k, top_p, min_p)
    )
    z_type = torch.promote_types(logits_BV.dtype, torch.float32)
    make = _make_rules if any(isinstance(value, Tensor) for value in values) else _make_rules_cached
    num_rows, vocab_size = logits_BV.shape
    return make((num_rows, vocab_size), z_type, logits_BV.device, temperature, top_k, top_p, min_p, num_stored)


def _make_rules(
    shape: tuple[int, int], z_type: torch.dtype, device: torch.device, temperature, top_k, top_p, min_p, num_stored: int
) -> Rules:
    num_rows, vocab_size = shape

    def rows(value, dtype: torch.dtype) -> Tensor:
        if isinstance(value, Tensor):
            assert value.shape == (num_rows,), f"{tuple(value.shape)} parameters for {num_rows} rows"
            return value.to(device, dtype)
        return torch.full((num_rows,), float(value), dtype=dtype, device=device)

    temperature_B, top_k_B = rows(temperature, z_type), rows(top_k, torch.int64)
    top_p_B, min_p_B = rows(top_p, torch.float64), rows(min_p, torch.float64)
    greedy_B = temperature_B == 0
    has_top_k_B = ~greedy_B & (top_k_B > 0) & (top_k_B < vocab_size)
    limit = min(num_stored, vocab_size) if num_stored else vocab_size
    return Rules(
        torch.where(greedy_B, 1.0, temperature_B).to(z_type),
        torch.where(has_top_k_B, top_k_B, vocab_size),
        has_top_k_B,
        torch.where(greedy_B, 1.0, top_p_B),
        torch.where(greedy_B, -torch.inf, min_p_B.log()).to(z_type),
        torch.where(greedy_B, 1, limit),
    )


_make_rules_cached = functools.lru_cache(maxsize=1)(_make_rules)  # numbers rarely change from step to step


def support_ref(z_BV: Tensor, rules: Rules) -> Tensor:
    """Returns whether a token is in the support, bool [B, V], as the reference: sorts whole rows."""
    vocab_size = z_BV.shape[1]
    sorted_BV, ids_BV = z_BV.sort(dim=1, descending=True, stable=True)  # ties by id
    masses_BV = (sorted_BV.double() - sorted_BV[:, :1].double()).exp()
    keep_BV = sorted_BV >= sorted_BV.gather(1, rules.top_k_B[:, None] - 1)
    sums_BV = torch.where(keep_BV, masses_BV, 0.0).cumsum(dim=1)
    first_BV = torch.searchsorted(-sorted_BV, -sorted_BV)  # of the tied tokens
    larger_BV = torch.nn.functional.pad(sums_BV, (1, 0)).gather(1, first_BV)
    in_nucleus_BV = (larger_BV < rules.top_p_B[:, None] * sums_BV[:, -1:]) | (rules.top_p_B[:, None] >= 1)
    keep_BV &= in_nucleus_BV | (first_BV == 0)
    keep_BV &= sorted_BV - sorted_BV[:, :1] >= rules.floor_B[:, None]
    keep_BV &= sorted_BV > -torch.inf
    keep_BV &= torch.arange(vocab_size, device=z_BV.device) < rules.limit_B[:, None]
    return torch.zeros_like(keep_BV).scatter_(1, ids_BV, keep_BV)


def largest(logits_BV: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Returns the `num` largest logits of each row and their ids [B, C], most likely first.

    They all lie in the `num` groups with the largest maxima. One fast pass finds these maxima, and two short top-k
    searches replace a long one.
    """
    vocab_size = logits_BV.shape[1]
    num_groups = vocab_size // GROUP
    if num_groups < max(2 * num, 1):
        values_BC, ids_BC = logits_BV.topk(min(num, vocab_size))
        return values_BC, ids_BC
    grouped = num_groups * GROUP
    # a group's tokens are num_groups apart, so amax works on whole vectors
    groups_BC = logits_BV[:, :grouped].unflatten(1, (GROUP, num_groups)).amax(1).topk(num, sorted=False).indices
    offsets = torch.arange(0, grouped, num_groups, device=logits_BV.device)
    ids_BC = (groups_BC[:, None] + offsets[:, None]).flatten(1)
    rest = torch.arange(grouped, vocab_size, device=logits_BV.device)
    ids_BC = torch.cat((ids_BC, rest.expand(len(ids_BC), -1)), 1)
    values_BC, order_BC = logits_BV.gather(1, ids_BC).to(torch.promote_types(logits_BV.dtype, torch.float32)).topk(num)
    return values_BC, ids_BC.gather(1, order_BC)


def support_sizes(
    z_BC: Tensor, masses_BC: Tensor, total_B: Tensor, below_B: Tensor | None, rules: Rules
) -> tuple[Tensor, Tensor]:
    """Returns how many of a row's sorted candidates are in the support [B], and whether the number is certain: bool
    [B].

    masses_BC = exp(z - max z), float64; total_B is their sum over the whole vocabulary. All tokens with z > below_B are
    candidates, tokens with z == below_B may be missing. below_B=None: all tokens are candidates.
    """
    kth_B1 = z_BC.gather(1, rules.top_k_B[:, None].clamp(max=z_BC.shape[1]) - 1)
    kth_B1 = torch.where(rules.has_top_k_B[:, None], kth_B1, -torch.inf)
    sums_BC = torch.where(z_BC >= kth_B1, masses_BC, 0.0).cumsum(dim=1)
    goal_B = rules.top_p_B * torch.where(rules.has_top_k_B, sums_BC[:, -1], total_B)
    # the candidate that reaches p; tokens tied with it are kept too
    last_B1 = (sums_BC < goal_B[:, None]).sum(1, keepdim=True).clamp(max=z_BC.shape[1] - 1)
    least_B1 = torch.where(rules.top_p_B[:, None] < 1, z_BC.gather(1, last_B1), -torch.inf).maximum(kth_B1)
    keep_BC = (z_BC >= least_B1) & (z_BC - z_BC[:, :1] >= rules.floor_B[:, None]) & (z_BC > -torch.inf)
    counts_B = torch.minimum(keep_BC.sum(1), rules.limit_B)
    if below_B is None:
        return counts_B, torch.ones_like(rules.has_top_k_B)
    last_B = z_BC.gather(1, (counts_B - 1).clamp(min=0)[:, None])[:, 0]
    certain_B = (last_B > below_B) & (~rules.has_top_k_B | (kth_B1[:, 0] > below_B))
    return counts_B, certain_B | (below_B == -torch.inf) | ~(total_B > 0)  # a row of NaN has no support


def first_candidates(rules: Rules, vocab_size: int, num_stored: int) -> int:
    """Returns how many of a row's largest logits to try first."""
    limited_B = (rules.limit_B < vocab_size) | (num_stored > 0)
    wanted_B = torch.where(limited_B, rules.limit_B + SPARE, FIRST_CANDIDATES)
    wanted_B = torch.where(rules.has_top_k_B, rules.top_k_B + SPARE, wanted_B)
    return min(int(wanted_B.max()), vocab_size)


def in_order(z_BC: Tensor, ids_BC: Tensor) -> tuple[Tensor, Tensor]:
    """Sorts candidates: the most likely first, ties by id."""
    ids_BC, order_BC = ids_BC.sort(dim=1)
    z_BC, by_z_BC = z_BC.gather(1, order_BC).sort(dim=1, descending=True, stable=True)
    return z_BC, ids_BC.gather(1, by_z_BC)


def support_minimum(z_BV: Tensor, total_B: Tensor, rules: Rules) -> Tensor:
    """Returns the smallest z in the support [B], for rows without a limit. Sorts the values of whole rows, in numpy:
    ten times as fast as in torch."""
    sorted_BV = torch.from_numpy(np.sort(z_BV.cpu().numpy(), axis=1)).to(z_BV.device).flip(1)
    masses_BV = (sorted_BV - sorted_BV[:, :1]).exp().double()
    counts_B, _ = support_sizes(sorted_BV, masses_BV, total_B, None, rules)
    return sorted_BV.gather(1, (counts_B - 1).clamp(min=0)[:, None])[:, 0]
