"""The tensor math of PPO for language models: pure functions of tensors and numbers.

Nothing here knows of ranks, yet every result is right on many: whatever is averaged or whitened is returned as local
*sums* (or asks for global ones), and the caller adds them over all data-parallel ranks before it divides. A rank
without data contributes empty tensors, whose sums are zeros.

Legend: B sequences, G response tokens.
 responses_BG  int32 or int64, -1 on padding, so that no token id (EOS included) can be mistaken for padding
 mask_BG       bool, True on the tokens that are trained on; elsewhere other [B, G] tensors may hold anything, even NaN
 values_BG1    [B, G+1]; column t is the value before response token t is emitted

Sources: [PPO] Schulman et al. 2017, arXiv 1707.06347; [GAE] Schulman et al. 2015, arXiv 1506.02438; [LM] Ziegler et
al. 2019, arXiv 1909.08593; [N+] Huang et al. 2024, arXiv 2403.17031; [KL] Schulman 2020, "Approximating KL
Divergence".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

WHITEN_EPS = 1e-8  # added to the variance, as in [LM]

# ---- tokens ---------------------------------------------------------------------------------------------------------


def response_mask(responses_BG: Tensor) -> Tensor:
    """True on real response tokens, the EOS included: bool [B, G]."""
    return responses_BG >= 0


def last_index(mask_BG: Tensor) -> Tensor:
    """Index of the last True of each row, -1 where there is none: int64 [B]."""
    counting_G = torch.arange(1, mask_BG.shape[1] + 1, device=mask_BG.device)
    return torch.where(mask_BG, counting_G, 0).amax(dim=1) - 1


def ended(responses_BG: Tensor, eos_ids: Sequence[int]) -> Tensor:
    """True where the last real token is an EOS id, False where the response was truncated (or is empty): bool [B]."""
    last_B = last_index(response_mask(responses_BG)).clamp(min=0)  # an empty response gives its -1, which is no token
    token_B = responses_BG.gather(1, last_B[:, None])[:, 0]
    return torch.isin(token_B, token_B.new_tensor(list(eos_ids)))


# ---- rewards --------------------------------------------------------------------------------------------------------


def shaped_scores(
    scores_B: Tensor,
    ended_B: Tensor,
    *,
    truncation: Literal["penalty", "bootstrap", "score"] = "penalty",
    truncation_penalty: float = -1.0,
    clip_score: float | None = None,
    mean: float = 0.0,
    std: float = 1.0,
) -> Tensor:
    """The score that enters the rewards: (score - mean) / std, then clipped to +-clip_score: [B].

    Only a response that ended has a meaningful score. A truncated one gets the fixed `truncation_penalty` instead
    ([N+]; neither normalised nor clipped), or 0 under "bootstrap", where `gae` continues it by its last value. "score"
    is for tasks whose responses all have the full length ([LM]'s 24 tokens): there a cut response is what is judged.
    """
    assert truncation in ("penalty", "bootstrap", "score") and std > 0
    shaped_B = (scores_B - mean) / std
    if clip_score is not None:
        shaped_B = shaped_B.clamp(-clip_score, clip_score)
    if truncation == "score":
        return shaped_B
    return torch.where(ended_B, shaped_B, truncation_penalty if truncation == "penalty" else 0.0)


def token_kl(logprobs_BG: Tensor, ref_logprobs_BG: Tensor, mask_BG: Tensor) -> Tensor:
    """log pi_actor - log pi_reference on the sampled token, signed, 0 outside the mask ([LM] eq. 2): [B, G]."""
    return torch.where(mask_BG, logprobs_BG - ref_logprobs_BG, 0.0)


def token_rewards(scores_B: Tensor, kl_BG: Tensor, mask_BG: Tensor, kl_coef: float) -> Tensor:
    """-kl_coef * kl on every token, plus the (shaped) score on the last real one ([LM] eq. 2): [B, G]."""
    is_last_BG = torch.arange(mask_BG.shape[1], device=mask_BG.device) == last_index(mask_BG)[:, None]
    penalty_BG = torch.where(mask_BG, -kl_coef * kl_BG, 0.0)
    return penalty_BG + torch.where(is_last_BG, scores_B[:, None].to(kl_BG.dtype), 0.0)


# ---- advantages -----------------------------------------------------------------------------------------------------


def gae(
    rewards_BG: Tensor,
    values_BG1: Tensor,
    mask_BG: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimates and returns, both [B, G] and 0 outside the mask ([GAE] eq. 16).

        delta_t = r_t + gamma V_{t+1} - V_t,     A_t = delta_t + gamma lam A_{t+1},     R_t = A_t + V_t

    where t+1 is the *next token of the mask*: nothing flows through masked tokens. After the last one V is 0, or, for
    the rows in `bootstrap_B` (bool [B]), the value in the column after it: a truncated response goes on, an ended one
    does not.
    """
    values_BG = values_BG1[:, :-1]
    next_value_B = torch.zeros_like(values_BG1[:, 0])
    if bootstrap_B is not None:
        after_B = values_BG1.gather(1, last_index(mask_BG)[:, None] + 1)[:, 0]
        next_value_B = torch.where(bootstrap_B, after_B, 0.0)
    next_advantage_B = torch.zeros_like(next_value_B)
    advantages_BG = torch.zeros_like(values_BG)
    for t in reversed(range(mask_BG.shape[1])):
        delta_B = rewards_BG[:, t] + gamma * next_value_B - values_BG[:, t]
        next_advantage_B = torch.where(mask_BG[:, t], delta_B + gamma * lam * next_advantage_B, next_advantage_B)
        next_value_B = torch.where(mask_BG[:, t], values_BG[:, t], next_value_B)
        advantages_BG[:, t] = torch.where(mask_BG[:, t], next_advantage_B, 0.0)
    return advantages_BG, torch.where(mask_BG, advantages_BG + values_BG, 0.0)


def moments(x: Tensor, mask: Tensor) -> Tensor:
    """(count, sum, sum of squares) of x over the mask, float64 [3]: add them over micro-batches and ranks.

    In float64 one pass is exact enough while |mean| < 1e4 std.
    """
    real = torch.where(mask, x.double(), 0.0)
    return torch.stack([mask.sum().double(), real.sum(), real.square().sum()])


def mean_and_variance(moments_3: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and *population* variance (divided by N) of what the moments were taken of; 0 and 0 if it was nothing."""
    count, total, squares = moments_3.unbind()
    mean = total / count.clamp(min=1.0)
    return mean, (squares / count.clamp(min=1.0) - mean.square()).clamp(min=0.0)


def whiten(x: Tensor, mask: Tensor, moments_3: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) by the *global* moments, 0 outside the mask."""
    mean, variance = mean_and_variance(moments_3)
    return torch.where(mask, (x.double() - mean) * torch.rsqrt(variance + WHITEN_EPS), 0.0).to(x.dtype)


# ---- losses ---------------------------------------------------------------------------------------------------------


def policy_loss_sum(
    logprobs_BG: Tensor, old_logprobs_BG: Tensor, advantages_BG: Tensor, mask_BG: Tensor, *, clip_ratio: float = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate ([PPO] eq. 7, negated) *summed* over the mask, and sums for the log.

        loss = max(-A ratio, -A clip(ratio, 1 - c, 1 + c)),     ratio = exp(d),  d = new logprob - old logprob

    Divide the loss and every entry of the statistics by the global token count. `approx_kl` sums exp(d) - 1 - d,
    which is never negative and an unbiased estimate of KL(old || new) [KL]; `approx_kl_sq` sums d^2 / 2, its
    second-order form.
    """
    difference_BG = torch.where(mask_BG, logprobs_BG - old_logprobs_BG, 0.0)
    ratio_BG = difference_BG.exp()
    advantages_BG = torch.where(mask_BG, advantages_BG, 0.0)
    free_BG = -advantages_BG * ratio_BG
    clipped_BG = -advantages_BG * ratio_BG.clamp(1.0 - clip_ratio, 1.0 + clip_ratio)
    loss_sum = torch.where(mask_BG, torch.maximum(free_BG, clipped_BG), 0.0).sum()
    d_BG = difference_BG.detach().double()
    return loss_sum, {
        "num_tokens": mask_BG.sum().double(),
        "policy_loss": loss_sum.detach().double(),
        "clip_fraction": (clipped_BG > free_BG).sum().double(),
        "ratio": torch.where(mask_BG, d_BG.exp(), 0.0).sum(),
        "approx_kl": (d_BG.expm1() - d_BG).sum(),
        "approx_kl_sq": 0.5 * d_BG.square().sum(),
    }


def entropy_bonus_sum(entropy_BG: Tensor, mask_BG: Tensor, *, coef: float) -> tuple[Tensor, dict[str, Tensor]]:
    """coef * H[pi(. | before the token)] ([PPO] eq. 9) *summed* over the mask: subtract it from the policy loss; and
    the sum of the entropies for the log. Divide both by the global token count."""
    entropy_sum = torch.where(mask_BG, entropy_BG, 0.0).sum()
    return coef * entropy_sum, {"entropy": entropy_sum.detach().double()}


def value_loss_sum(
    values_BG: Tensor,
    old_values_BG: Tensor,
    returns_BG: Tensor,
    mask_BG: Tensor,
    *,
    clip_value: float = 0.2,
    value_coef: float = 0.5,
) -> tuple[Tensor, dict[str, Tensor]]:
    """value_coef * max((V - R)^2, (clip(V, V_old +- clip_value) - R)^2) *summed* over the mask ([LM]), and log sums."""
    values_BG = torch.where(mask_BG, values_BG, 0.0)
    old_BG = torch.where(mask_BG, old_values_BG, 0.0)
    returns_BG = torch.where(mask_BG, returns_BG, 0.0)
    near_BG = torch.clamp(values_BG, old_BG - clip_value, old_BG + clip_value)
    free_BG, clipped_BG = (values_BG - returns_BG).square(), (near_BG - returns_BG).square()
    loss_sum = value_coef * torch.maximum(free_BG, clipped_BG).sum()
    return loss_sum, {
        "num_tokens": mask_BG.sum().double(),
        "value_loss": loss_sum.detach().double(),
        "value_clip_fraction": (clipped_BG > free_BG).sum().double(),
        "value_error_sq": free_BG.detach().double().sum(),
    }


# ---- guards and controllers: numbers that are already global --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parity:
    """How far the generator's logprobs lie from the teacher-forced ones, and at which token most (row -1: no token)."""

    num_tokens: int
    sum_abs: float  # nats, over all tokens: add over ranks, divide by the tokens
    max_abs: float  # nats; infinite if a logprob is not a number
    row: int
    position: int

    @property
    def mean_abs(self) -> float:
        return self.sum_abs / max(self.num_tokens, 1)


def parity(generated_BG: Tensor, forced_BG: Tensor, mask_BG: Tensor) -> Parity:
    """Compare two passes' logprobs of the same tokens; the caller sets the tolerance."""
    difference_BG = (generated_BG.double() - forced_BG.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    difference_BG = torch.where(mask_BG, difference_BG, -1.0)
    if not mask_BG.any():
        return Parity(num_tokens=0, sum_abs=0.0, max_abs=0.0, row=-1, position=-1)
    row, position = divmod(int(difference_BG.argmax()), mask_BG.shape[1])
    worst = float(difference_BG[row, position])
    return Parity(int(mask_BG.sum()), float(difference_BG[mask_BG].sum()), worst, row, position)


def next_kl_coef(
    kl_coef: float, mean_kl: float, num_sequences: int, *, target: float | None = 6.0, horizon: float = 10_000
) -> float:
    """The coefficient for the next iteration ([LM] section 2.2); `target` None keeps it fixed.

    kl_coef <- kl_coef (1 + e n / horizon),  e = clip(mean_kl / target - 1, -0.2, 0.2), with mean_kl the global mean
    over the iteration's n sequences of the *sum* of token_kl over a response. Call it once per iteration.
    """
    if target is None:
        return kl_coef
    error = min(max(mean_kl / target - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + error * num_sequences / horizon)


def kl_exceeds(approx_kl_sum: float, num_tokens: float, limit: float | None) -> bool:
    """Whether to stop the epochs early; from the *global* sums, so all ranks decide alike. NaN exceeds any limit."""
    return limit is not None and num_tokens > 0 and not approx_kl_sum / num_tokens <= limit


def learning_rate(
    step: int,
    *,
    peak: float,
    num_warmup_steps: int = 0,
    num_steps: int = 0,
    decay: Literal["constant", "linear", "cosine"] = "constant",
) -> float:
    """The rate of optimizer step `step` = 0, 1, ...: peak (step + 1) / num_warmup_steps while that is below the peak,
    then constant, or down to 0 at step `num_steps`, on a line or on half a cosine."""
    if step < num_warmup_steps:
        return peak * (step + 1) / num_warmup_steps
    if decay == "constant":
        return peak
    progress = min((step - num_warmup_steps) / max(num_steps - num_warmup_steps, 1), 1.0)
    left = {"linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}[decay]
    return peak * left


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Mean and variance of all scores so far, for score normalisation; changes only between iterations.

    Kept as (count, mean, sum of squared deviations) and merged by the formula of Chan, Golub and LeVeque (1983), so
    it does not lose digits over a long run.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """Population standard deviation; 1 while there is no spread to divide by."""
        std = math.sqrt(self.squares / self.count) if self.count else 0.0
        return std if std > 1e-6 else 1.0

    def updated(self, moments_3: Tensor) -> "RunningMoments":
        """With the global `moments` of one more iteration's scores."""
        count = float(moments_3[0])
        if count == 0:
            return self
        mean, variance = (float(m) for m in mean_and_variance(moments_3))
        total, shift = self.count + count, mean - self.mean
        squares = self.squares + variance * count + shift * shift * self.count * count / total
        return RunningMoments(total, self.mean + shift * count / total, squares)
