"""A second, slow GRPO family as an oracle: one group, one sequence and one token after the other.

It shares no code with rlhf_spmd (and must not): every rule is written again, as plainly as possible. No padding, no
masks, no batches, no ranks. A mini-batch is a list of groups, a group a list of samples. Numbers are Python floats but
for the logprobs of the policy that trains, which carry gradients.
"""

import math
import statistics
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Sample:
    logprobs: list[Tensor]  # of the policy that trains
    old: list[float]
    reference: list[float]
    generator: list[float]
    score: float
    ended: bool = True
    advantages: list[float] = field(default_factory=list)  # of each token
    used: bool = True


@dataclass(frozen=True)
class Rules:
    limit: int  # tokens of a response
    scale: str = "group"
    scale_eps: float = 1e-4
    overlong: str = "keep"
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    drop_equal_groups: bool = False
    ratio_level: str = "token"
    surrogate: str = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    gate_temperatures: tuple[float, float] = (1.0, 1.05)
    aggregation: str = "token-mean"
    kl_coef: float = 0.0
    kl_in: str = "loss"
    kl_estimator: str = "k3"
    kl_unbiased: bool = False
    importance_weights: str = "none"
    importance_cap: float | None = 2.0
    rejection: str = "none"
    rejection_range: tuple[float, float] | None = None
    generator_clip: bool = False


def reward(sample: Sample, rules: Rules) -> float:
    if rules.overlong != "shape":
        return sample.score
    free, length = rules.limit - rules.overlong_buffer, len(sample.old)
    if length <= free:
        return sample.score
    return sample.score - rules.overlong_penalty * (length - free) / rules.overlong_buffer


def penalised(sample: Sample, rules: Rules) -> float:
    if rules.kl_in == "loss":
        return reward(sample, rules)
    kl = sum(old - reference for old, reference in zip(sample.old, sample.reference, strict=True))
    return reward(sample, rules) - rules.kl_coef * kl


def counts(sample: Sample, rules: Rules) -> bool:
    """Returns whether its reward counts in the baseline of its group."""
    return sample.ended or rules.overlong != "mask"


def grpo_advantages(groups: list[list[Sample]], rules: Rules) -> None:
    for group in groups:
        plain = [reward(one, rules) for one in group if counts(one, rules)]
        rewards = [penalised(one, rules) for one in group if counts(one, rules)]
        is_equal = not rewards or max(rewards) - min(rewards) <= 1e-6
        drops = rules.drop_equal_groups and (not plain or max(plain) - min(plain) <= 1e-6)
        for one in group:
            one.used = counts(one, rules) and not drops
            a = penalised(one, rules) - statistics.fmean(rewards) if counts(one, rules) and not is_equal else 0.0
            if rules.scale == "group" and a:
                a /= statistics.stdev(rewards) + rules.scale_eps
            if rules.scale == "mean" and a:
                a /= abs(statistics.fmean(rewards)) + rules.scale_eps
            one.advantages = [a] * len(one.old)
    used_rewards = [penalised(one, rules) for group in groups for one in group if one.used]
    if rules.scale == "batch":
        for one in (one for group in groups for one in group):
            one.advantages = [a / (statistics.stdev(used_rewards) + rules.scale_eps) for a in one.advantages]


def first_groups(mini_batches: list[list[list[Sample]]], num_wanted: int) -> None:
    """Keeps, of each mini-batch, only the first so many groups with a sample in use."""
    for groups in mini_batches:
        num_found = 0
        for group in groups:
            if any(one.used for one in group):
                num_found += 1
                if num_found > num_wanted:
                    for one in group:
                        one.used = False


def rloo_advantages(groups: list[list[Sample]], kl_coef: float) -> None:
    for group in groups:
        rewards = [
            one.score - kl_coef * sum(old - ref for old, ref in zip(one.old, one.reference, strict=True))
            for one in group
        ]
        for index, one in enumerate(group):
            others = rewards[:index] + rewards[index + 1 :]
            one.advantages = [rewards[index] - statistics.fmean(others)] * len(one.old)


def rewards_to_go(one: Sample, score: float, kl_coef: float) -> list[float]:
    rewards = [-kl_coef * (old - ref) for old, ref in zip(one.old, one.reference, strict=True)]
    rewards[-1] += score
    return [sum(rewards[t:]) for t in range(len(rewards))]


def remax_advantages(samples: list[Sample], greedy_scores: list[float], kl_coef: float) -> None:
    for one, greedy in zip(samples, greedy_scores, strict=True):
        one.advantages = [x - greedy for x in rewards_to_go(one, one.score, kl_coef)]


def reinforce_plus_plus_advantages(groups: list[list[Sample]], kl_coef: float, baseline: str) -> None:
    for group in groups:
        base = statistics.fmean(one.score for one in group) if baseline == "group" else 0.0
        for one in group:
            one.advantages = rewards_to_go(one, one.score - base, kl_coef)
    everything = [a for group in groups for one in group for a in one.advantages]
    mean, std = statistics.fmean(everything), math.sqrt(statistics.pvariance(everything) + 1e-8)
    for group in groups:
        for one in group:
            one.advantages = [(a - mean) / std for a in one.advantages]


def weights(one: Sample, rules: Rules) -> list[float]:
    """Returns what corrects the loss of each token for a generator that is not the policy before training."""
    logs = [old - drawn for old, drawn in zip(one.old, one.generator, strict=True)]
    product, geometric = math.exp(sum(logs)), math.exp(statistics.fmean(logs))
    cap = math.inf if rules.importance_cap is None else rules.importance_cap
    found = []
    for log in logs:
        w = {"token": math.exp(log), "sequence": product, "geometric": geometric}
        factor = 1.0 if rules.importance_weights == "none" else min(w[rules.importance_weights], cap)
        if rules.rejection != "none":
            usual = {"token": (0.5, 5.0), "sequence": (0.5, 2.0), "geometric": (0.999, 1.001)}
            low, high = rules.rejection_range or usual[rules.rejection]
            factor = factor if low <= w[rules.rejection] <= high else 0.0
        found.append(factor)
    return found


def weight_metrics(samples: list[Sample], rules: Rules) -> dict[str, float]:
    """Returns what is logged of the weights of some samples, over all their tokens."""
    level = rules.rejection if rules.importance_weights == "none" else rules.importance_weights
    cap = math.inf if rules.importance_cap is None or rules.importance_weights == "none" else rules.importance_cap
    raw, used = [], []
    for one in samples:
        logs = [old - drawn for old, drawn in zip(one.old, one.generator, strict=True)]
        w = {"sequence": math.exp(sum(logs)), "geometric": math.exp(statistics.fmean(logs))}
        raw += [math.exp(log) if level == "token" else w[level] for log in logs]
        used += weights(one, rules)
    squares = sum(f * f for f in used)
    return {
        "importance_max": max(raw),
        "importance_truncated": sum(w > cap for w in raw) / len(raw),
        "importance_ess": sum(used) ** 2 / (len(used) * squares) if squares else 0.0,
    }


def leveled(logs: list, level: str) -> list:
    if level == "sequence":
        return [sum(logs) / len(logs)] * len(logs)
    return [sum(logs)] * len(logs) if level == "product" else logs


def leaves_the_generator(one: Sample, rules: Rules) -> list[bool]:
    """Returns which tokens are beyond the clip range around the generator already, and would be pushed on."""
    logs = [float(new.detach()) - drawn for new, drawn in zip(one.logprobs, one.generator, strict=True)]
    found = []
    for log, a in zip(leveled(logs, rules.ratio_level), one.advantages, strict=True):
        ratio = math.exp(log)
        found.append((a > 0 and ratio > 1 + rules.clip_high) or (a < 0 and ratio < 1 - rules.clip_low))
    return found


def token_loss(one: Sample, t: int, ratio: Tensor, rules: Rules) -> Tensor:
    a, low, high = one.advantages[t], 1 - rules.clip_low, 1 + rules.clip_high
    if rules.surrogate == "cispo":
        return -min(max(float(ratio.detach()), low), high) * a * one.logprobs[t]
    if rules.surrogate in ("dppo", "dppo_kl"):
        new, old = math.exp(float(one.logprobs[t].detach())), math.exp(one.old[t])
        distance = abs(new - old)
        if rules.surrogate == "dppo_kl":
            others = (1 - old) / (1 - new)  # made-up probabilities may be above 1
            distance = old * math.log(old / new) + (1 - old) * math.log(others) if others > 0 else math.nan
        if (a > 0 and new > old and distance > rules.clip_high) or (a < 0 and new < old and distance > rules.clip_low):
            return 0.0 * one.logprobs[t]
        return -min(float(ratio.detach()), 20.0) * a * one.logprobs[t]
    if rules.surrogate == "sapo":
        temperature = rules.gate_temperatures[0 if a > 0 else 1]
        return -a * 4 / temperature / (1 + torch.exp(-temperature * (ratio - 1)))
    if rules.surrogate == "gmpo":
        logs = [new - old for new, old in zip(one.logprobs, one.old, strict=True)]
        if a > 0:
            logs = [log if float(log.detach()) < rules.clip_high else log * 0 + rules.clip_high for log in logs]
        else:
            logs = [log if float(log.detach()) > -rules.clip_low else log * 0 - rules.clip_low for log in logs]
        return -a * torch.exp(sum(logs) / len(logs))
    if rules.surrogate == "reinforce":
        return -a * one.logprobs[t]
    loss = -min(ratio * a, torch.clamp(ratio, low, high) * a)
    if rules.dual_clip is not None and a < 0:
        loss = min(loss, torch.tensor(-rules.dual_clip * a, dtype=loss.dtype))
    return loss


def divergence(d: Tensor, estimator: str) -> Tensor:
    return {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) + d - 1}[estimator]


def loss(groups: list[list[Sample]], rules: Rules) -> Tensor:
    """Computes the loss of a whole mini-batch."""
    per_sequence = []
    for one in (one for group in groups for one in group if one.used):
        logs = leveled([new - old for new, old in zip(one.logprobs, one.old, strict=True)], rules.ratio_level)
        factors, tokens = weights(one, rules), []
        if rules.generator_clip:
            factors = [0.0 if far else f for f, far in zip(factors, leaves_the_generator(one, rules), strict=True)]
        for t, log in enumerate(logs):
            term = factors[t] * token_loss(one, t, torch.exp(log), rules)
            if rules.kl_coef and rules.kl_in == "loss":
                kl = divergence(one.logprobs[t] - one.reference[t], rules.kl_estimator)
                term = term + rules.kl_coef * (kl * torch.exp(log) if rules.kl_unbiased else kl)
            tokens.append(term)
        per_sequence.append(tokens)
    if not per_sequence:
        return torch.zeros((), dtype=torch.float64)
    if rules.aggregation == "token-mean":
        return sum(sum(tokens) for tokens in per_sequence) / sum(len(tokens) for tokens in per_sequence)
    if rules.aggregation == "seq-mean-token-mean":
        return sum(sum(tokens) / len(tokens) for tokens in per_sequence) / len(per_sequence)
    return sum(sum(tokens) / rules.limit for tokens in per_sequence) / len(per_sequence)
