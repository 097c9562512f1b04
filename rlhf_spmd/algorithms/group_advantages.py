"""Advantages without a critic: from the other samples of a prompt, from a greedy response, or from the whole batch.

Pure functions that grpo, rloo, remax, reinforce_plus_plus and distill name. All sums over the batch are sums
over rows, added over all ranks, so results do not depend on the number of ranks.

Legend: N groups (prompts), S samples of a prompt, G response tokens; G is generation.max_new_tokens.
 scores_NS     the score of each response
 mask_NSG      bool, True on response tokens; elsewhere other [N, S, G] tensors may hold anything, even NaN
Where a function has scope "row", N and S are one dimension B.

Sources: [GRPO] Shao et al. 2024, arXiv 2402.03300; [DR] Liu et al. 2025, arXiv 2503.20783; [DAPO] Yu et al. 2025, arXiv
2503.14476; [GKD] Agarwal et al. 2023, arXiv 2306.13649; [RLOO] Ahmadian et al. 2024, arXiv 2402.14740; [REMAX] Li et
al. 2023, arXiv 2310.10505; [MAXRL] arXiv 2602.02710; [R++] Hu et al. 2025, arXiv 2501.03262.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from rlhf_spmd.algorithms.advantages import Sums, moments, token_kl, token_rewards, whitened
from rlhf_spmd.errors import UserError

EQUAL = 1e-6  # rewards whose range is at most this are equal


# ---- GRPO and its variants ------------------------------------------------------------------------------------------


def group_advantages(
    scores_NS: Tensor,
    mask_NSG: Tensor,
    ended_NS: Tensor,
    logprobs_NSG: Tensor | None = None,
    ref_logprobs_NSG: Tensor | None = None,
    *,
    kl_coef: float = 0.0,
    scale: Literal["group", "batch", "mean", "none"] = "group",
    scale_eps: float = 1e-4,
    overlong: Literal["keep", "shape", "mask"] = "keep",
    overlong_buffer: int = 0,
    overlong_penalty: float = 1.0,
    drop_equal_groups: bool = False,
) -> tuple[Tensor, Tensor, Sums]:
    """Returns a = (r - mean of the group) / (std of the group + scale_eps) ([GRPO] section 4.1.2): advantages_NS,
    used_NS, sums.

    The standard deviation is the unbiased one (divided by S - 1). scale "none" leaves the division out ([DR]); "mean"
    divides by the size of the group's mean ([MAXRL], for rewards of at least 0); "batch" by the standard deviation of
    the whole batch, in `group_advantages_finish`. used_NS is 1.0 where a response is trained on and 0.0 where it is
    left out: groups with equal rewards under drop_equal_groups (dynamic sampling, [DAPO] section 3.2), truncated
    responses under overlong "mask" ([DAPO] section 3.4). Of the latter no reward counts in the mean, in the standard
    deviation or in whether a group's rewards are equal. With logprobs of a reference, r is less kl_coef times the sum
    over the response of log pi_actor - log pi_reference; whether rewards are equal, and the log, are of rewards without
    it.
    """
    rewards_NS = overlong_rewards(
        scores_NS, mask_NSG, overlong=overlong, overlong_buffer=overlong_buffer, overlong_penalty=overlong_penalty
    )
    wide_NS, kl_NS = rewards_NS.double(), response_kl(logprobs_NSG, ref_logprobs_NSG, mask_NSG)
    used_NS = ended_NS if overlong == "mask" else torch.ones_like(ended_NS)
    eps = scale_eps if scale in ("group", "mean") else None
    advantages_NS, std_N1, is_equal_N = _scaled_by_group(wide_NS, used_NS, eps, by_mean=scale == "mean")
    if kl_NS is not None:
        advantages_NS, *_ = _scaled_by_group(wide_NS - kl_coef * kl_NS, used_NS, eps, by_mean=scale == "mean")
    if drop_equal_groups:
        used_NS = used_NS & ~is_equal_N[:, None]
    ones_NS, is_equal_N = torch.ones_like(wide_NS), is_equal_N.double()
    sums: Sums = {
        "reward": (wide_NS, ones_NS),
        "reward_sq": (wide_NS.square(), ones_NS),
        "group_std": (std_N1[:, 0], ones_NS[:, 0]),
        "equal_groups": (is_equal_N, ones_NS[:, 0]),
        "used": (used_NS.double(), ones_NS),
    } | (_kl_sums(kl_NS, mask_NSG) if kl_NS is not None else {})
    return advantages_NS.to(scores_NS.dtype), used_NS.to(scores_NS.dtype), sums


def equal_groups(
    scores_NS: Tensor,
    mask_NSG: Tensor,
    ended_NS: Tensor,
    *,
    overlong: Literal["keep", "shape", "mask"] = "keep",
    overlong_buffer: int = 0,
    overlong_penalty: float = 1.0,
) -> Tensor:
    """Returns 1.0 for the responses of a group with equal rewards, as in `group_advantages`, which is sampled again
    ([DAPO] section 3.2), else 0.0: equal_NS."""
    rewards_NS = overlong_rewards(
        scores_NS, mask_NSG, overlong=overlong, overlong_buffer=overlong_buffer, overlong_penalty=overlong_penalty
    )
    used_NS = ended_NS if overlong == "mask" else torch.ones_like(ended_NS)
    *_, is_equal_N = _scaled_by_group(rewards_NS.double(), used_NS, None)
    return is_equal_N[:, None].expand_as(scores_NS).to(scores_NS.dtype)


def response_kl(logprobs_NSG: Tensor | None, ref_logprobs_NSG: Tensor | None, mask_NSG: Tensor) -> Tensor | None:
    """Returns the sums over responses of log pi_actor - log pi_reference, float64 [N, S]; None without a reference."""
    if logprobs_NSG is None or ref_logprobs_NSG is None:
        return None
    return token_kl(logprobs_NSG, ref_logprobs_NSG, mask_NSG).double().sum(-1)


def _scaled_by_group(
    wide_NS: Tensor, counted_NS: Tensor, scale_eps: float | None, *, by_mean: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (r - mean of the group) / (std of the group + scale_eps), or by_mean the size of the mean in place of the
    std, without the division if scale_eps is None; the standard deviations [N, 1]; and whether all rewards of a group
    are equal [N]. Only the counted responses enter these. The advantages of the others, and of one that is alone, are
    0."""
    num_N1 = counted_NS.sum(1, keepdim=True)
    largest_N = torch.where(counted_NS, wide_NS, -math.inf).amax(1)
    is_equal_N = largest_N - torch.where(counted_NS, wide_NS, math.inf).amin(1) <= EQUAL
    mean_N1 = torch.where(counted_NS, wide_NS, 0.0).sum(1, keepdim=True) / num_N1.clamp(min=1)
    centred_NS = torch.where(counted_NS, wide_NS - mean_N1, 0.0)
    std_N1 = (centred_NS.square().sum(1, keepdim=True) / (num_N1 - 1).clamp(min=1)).sqrt()
    by_N1 = mean_N1.abs() if by_mean else std_N1
    scaled_NS = centred_NS if scale_eps is None else centred_NS / (by_N1 + scale_eps)
    return torch.where(is_equal_N[:, None], 0.0, scaled_NS), std_N1, is_equal_N  # 0 is not the rounding of a mean


def overlong_rewards(
    scores_NS: Tensor,
    mask_NSG: Tensor,
    *,
    overlong: Literal["keep", "shape", "mask"],
    overlong_buffer: int,
    overlong_penalty: float,
) -> Tensor:
    """Returns the scores; under "shape" minus a penalty that grows from 0 to overlong_penalty over the last
    overlong_buffer tokens before the limit ([DAPO] eq. 13)."""
    if overlong != "shape":
        return scores_NS
    begin = mask_NSG.shape[-1] - overlong_buffer
    beyond_NS = (mask_NSG.sum(-1) - begin).clamp(min=0) / overlong_buffer
    return scores_NS - overlong_penalty * beyond_NS


def group_advantages_sums(
    scores_NS: Tensor,
    mask_NSG: Tensor,
    used_NS: Tensor,
    logprobs_NSG: Tensor | None = None,
    ref_logprobs_NSG: Tensor | None = None,
    *,
    kl_coef: float = 0.0,
    overlong: Literal["keep", "shape", "mask"] = "keep",
    overlong_buffer: int = 0,
    overlong_penalty: float = 1.0,
) -> Tensor:
    """Sums over the batch: groups with a response that is trained on, and count, sum and sum of squares of the rewards
    of those responses: float64 [4]."""
    rewards_NS = overlong_rewards(
        scores_NS, mask_NSG, overlong=overlong, overlong_buffer=overlong_buffer, overlong_penalty=overlong_penalty
    )
    if (kl_NS := response_kl(logprobs_NSG, ref_logprobs_NSG, mask_NSG)) is not None:
        rewards_NS = rewards_NS.double() - kl_coef * kl_NS
    is_used_NS = used_NS > 0
    return torch.cat((is_used_NS.any(1).sum().double()[None], moments(rewards_NS, is_used_NS)))


def group_advantages_finish(
    advantages_NS: Tensor,
    used_NS: Tensor,
    sums: Tensor,
    *,
    scale: Literal["group", "batch", "mean", "none"] = "group",
    scale_eps: float = 1e-4,
    min_groups: int = 0,
) -> tuple[Tensor, Tensor]:
    """Returns advantages, divided by the batch's standard deviation under scale "batch", and unchanged used_NS. Raises
    UserError if fewer than min_groups groups remain."""
    num_groups, count, total, squares = sums.tolist()
    if num_groups < min_groups:
        raise UserError(
            f"{num_groups:.0f} groups of this iteration remain to train on, and grpo.min_groups is {min_groups}: the "
            "others have equal rewards or only truncated responses; raise rollout_batch, lower grpo.min_groups, or use "
            "prompts that are answered correctly sometimes, but not always"
        )
    if scale == "batch":
        variance = (squares - total * total / max(count, 1.0)) / max(count - 1.0, 1.0)
        advantages_NS = advantages_NS / (max(variance, 0.0) ** 0.5 + scale_eps)
    return advantages_NS, used_NS


def turn_advantages(advantages_NS: Tensor, turn_rewards_NSG: Tensor, mask_NSG: Tensor) -> Tensor:
    """Returns advantages of turns, for rows that are episodes: what an episode earns from a turn on, minus the mean of
    the group's *episodes*: advantages_NSG.

    advantages_NS: of episodes, not scaled. turn_rewards_NSG: the reward of each turn, on its last token. The mean is
        not one over the episodes that still run in a turn: their number is the policy's choice, and such a mean puts a
        hidden price on another turn.
    """
    rewards_NSG = torch.where(mask_NSG, turn_rewards_NSG, 0.0).double()
    earned_NSG = rewards_NSG.cumsum(-1) - rewards_NSG  # by earlier turns
    return torch.where(mask_NSG, advantages_NS[..., None] - earned_NSG, 0.0).to(advantages_NS.dtype)


def group_starts(scores_NS: Tensor) -> Tensor:
    """Returns 1.0 for the first sample of each group, 0.0 for the others: starts_NS, for functions that see no
    groups."""
    starts_NS = torch.zeros_like(scores_NS)
    starts_NS[:, 0] = 1.0
    return starts_NS


def first_groups(used_MC: Tensor, starts_MC: Tensor, *, oversampling: float) -> tuple[Tensor, Sums]:
    """Keeps, of the groups of each mini-batch that have a response to train on, the first ones, so that one of
    `oversampling` groups is trained on. Returns trained_MC, which is used_MC with 0.0 for the groups left over, and
    sums.

    M mini-batches, C columns; the samples of a prompt are neighbours. The order is that of the columns, which is random
    and does not depend on ranks."""
    group_MC = starts_MC.cumsum(1).long() - 1
    num_groups = int(starts_MC[0].sum())
    num_wanted = round(num_groups / oversampling)
    is_kept_MN = torch.zeros(len(used_MC), num_groups, dtype=torch.long, device=used_MC.device)
    is_kept_MN = is_kept_MN.scatter_add(1, group_MC, (used_MC > 0).long()) > 0
    is_trained_MN = is_kept_MN & (is_kept_MN.cumsum(1) <= num_wanted)
    trained_MC = torch.where(is_trained_MN.gather(1, group_MC), used_MC, 0.0)
    num_trained_M = is_trained_MN.sum(1).double()
    sums: Sums = {
        "trained_groups": (num_trained_M.sum(), len(used_MC)),
        "short_steps": ((num_trained_M < num_wanted).sum().double(), len(used_MC)),
    }
    return trained_MC, sums


# ---- RLOO -----------------------------------------------------------------------------------------------------------


def leave_one_out_advantages(
    scores_NS: Tensor,
    mask_NSG: Tensor,
    logprobs_NSG: Tensor | None = None,
    ref_logprobs_NSG: Tensor | None = None,
    *,
    kl_coef: float = 0.0,
) -> tuple[Tensor, Sums]:
    """Returns a = r - mean of the other samples' r = S/(S-1) (r - mean), with r the score minus kl_coef times the sum
    over the response of log pi_actor - log pi_reference ([RLOO] eq. 9): advantages_NS and sums."""
    wide_NS, sums = scores_NS.double(), Sums()
    if (kl_NS := response_kl(logprobs_NSG, ref_logprobs_NSG, mask_NSG)) is not None:
        wide_NS = wide_NS - kl_coef * kl_NS
        sums = _kl_sums(kl_NS, mask_NSG)
    samples = scores_NS.shape[1]
    advantages_NS = (wide_NS - wide_NS.mean(1, keepdim=True)) * (samples / (samples - 1))
    return advantages_NS.to(scores_NS.dtype), _reward_sums(scores_NS) | sums


# ---- ReMax ----------------------------------------------------------------------------------------------------------


def greedy_baseline_advantages(
    scores_B: Tensor,
    greedy_scores_B: Tensor,
    mask_BG: Tensor,
    logprobs_BG: Tensor | None = None,
    ref_logprobs_BG: Tensor | None = None,
    *,
    kl_coef: float = 0.0,
) -> tuple[Tensor, Sums]:
    """Returns A_t = sum over t' >= t of r_t' - score of the greedy response ([REMAX] eq. 7): advantages_BG and sums.
    r_t is -kl_coef times the log-ratio to the reference, plus the score at the last token."""
    kl_BG, sums = torch.zeros_like(mask_BG, dtype=torch.float64), Sums()
    if logprobs_BG is not None and ref_logprobs_BG is not None:
        kl_BG = token_kl(logprobs_BG, ref_logprobs_BG, mask_BG).double()
        sums = _kl_sums(kl_BG.sum(1), mask_BG)
    returns_BG = rewards_to_go(token_rewards(scores_B.double(), kl_BG, mask_BG, kl_coef))
    advantages_BG = torch.where(mask_BG, returns_BG - greedy_scores_B.double()[:, None], 0.0)
    greedy = greedy_scores_B.double().sum(), len(greedy_scores_B)
    return advantages_BG.to(scores_B.dtype), _reward_sums(scores_B) | sums | {"greedy_reward": greedy}


def rewards_to_go(rewards_BG: Tensor) -> Tensor:
    """Returns the sum of a token's reward and of all later ones, without discount: [..., G]."""
    return rewards_BG.flip(-1).cumsum(-1).flip(-1)


# ---- REINFORCE++ ----------------------------------------------------------------------------------------------------


def batch_advantages(
    scores_NS: Tensor,
    mask_NSG: Tensor,
    logprobs_NSG: Tensor | None = None,
    ref_logprobs_NSG: Tensor | None = None,
    *,
    baseline: Literal["none", "group"] = "none",
    kl_in: Literal["reward", "loss"] = "reward",
    kl_coef: float = 0.0,
) -> tuple[Tensor, Sums]:
    """Returns rewards to go ([R++] section 3): advantages_NSG before whitening over the batch, and sums. Token t's
    reward is -kl_coef times the log-ratio to the reference (kl_in "reward"), plus the score at the last token. baseline
    "group" first subtracts the group's mean from the scores."""
    wide_NS, sums = scores_NS.double(), _reward_sums(scores_NS)
    kl_NSG = torch.zeros_like(mask_NSG, dtype=torch.float64)
    if logprobs_NSG is not None and ref_logprobs_NSG is not None and kl_in == "reward":
        kl_NSG = token_kl(logprobs_NSG, ref_logprobs_NSG, mask_NSG).double()
        sums |= _kl_sums(kl_NSG.sum(-1), mask_NSG)
    if baseline == "group":
        wide_NS = wide_NS - wide_NS.mean(1, keepdim=True)
    flat = token_rewards(wide_NS.flatten(), kl_NSG.flatten(0, -2), mask_NSG.flatten(0, -2), kl_coef)
    returns_NSG = rewards_to_go(flat).view_as(mask_NSG)
    return torch.where(mask_NSG, returns_NSG, 0.0).to(scores_NS.dtype), sums


def batch_advantages_sums(advantages_NSG: Tensor, mask_NSG: Tensor) -> Tensor:
    """Returns count, sum and sum of squares over all tokens of the batch, float64 [3]."""
    return moments(advantages_NSG, mask_NSG)


def batch_advantages_finish(advantages_NSG: Tensor, mask_NSG: Tensor, sums: Tensor) -> Tensor:
    """Returns advantages whitened over all tokens of the batch."""
    return whitened(advantages_NSG, mask_NSG, sums)


# ---- distillation ---------------------------------------------------------------------------------------------------


def distillation_advantages(
    logprobs: Tensor,
    teacher_logprobs: Tensor,
    mask: Tensor,
    scores_NS: Tensor | None = None,
    *,
    kl_coef: float = 1.0,
    task_coef: float = 0.0,
    scale_eps: float = 1e-4,
) -> tuple[Tensor, Sums]:
    """Returns A_t = -kl_coef (log pi_actor - log pi_teacher) of token t: the reverse KL divergence, estimated from the
    actor's own tokens ([GKD]), plus task_coef times the response's advantage of GRPO: advantages and sums.

    Dims are [B, G]; with scores [N, S, G].
    """
    kl, num_tokens = token_kl(logprobs, teacher_logprobs, mask).double(), mask.sum(-1).double()
    advantages, sums = -kl_coef * kl, Sums(teacher_kl=(kl.sum(-1), num_tokens))
    if scores_NS is not None:
        task_NS = _scaled_by_group(scores_NS.double(), torch.ones_like(scores_NS, dtype=torch.bool), scale_eps)[0]
        advantages = advantages + task_coef * task_NS[..., None]
        sums |= _reward_sums(scores_NS)
    return torch.where(mask, advantages, 0.0).to(logprobs.dtype), sums


# ---- sums for the log -----------------------------------------------------------------------------------------------


def _reward_sums(scores: Tensor) -> Sums:
    """Sums of scores and of their squares, by sample, so that each rank counts its own."""
    wide = scores.double()
    if wide.dim() == 1:
        return {"reward": (wide.sum(), len(wide)), "reward_sq": (wide.square().sum(), len(wide))}
    return {"reward": (wide, torch.ones_like(wide)), "reward_sq": (wide.square(), torch.ones_like(wide))}


def _kl_sums(kl: Tensor, mask: Tensor) -> Sums:
    """Returns nats per response and per token, from the sums over responses: [B] or [N, S]."""
    num_tokens = mask.sum(-1).double()
    if kl.dim() == 1:
        return {"kl": (kl.sum(), len(kl)), "kl_per_token": (kl.sum(), num_tokens.sum())}
    return {"kl": (kl, torch.ones_like(kl)), "kl_per_token": (kl, num_tokens)}
