"""A second, slow PPO as an oracle: one process, one unpadded sequence and one token after the other.

It shares no code with rlhf_spmd (and must not): every rule is written again, as plainly as possible. No padding, no
masks, no batches, no ranks; GAE is the double sum, AdamW and gradient clipping are written out. A model is
whatever the two callables understand:

    logits(actor, tokens: list[int]) -> Tensor [T, V]     row i predicts token i + 1
    value(critic, tokens: list[int]) -> Tensor [T]        entry i is the value after token i

Run it in float64 and compare to 1e-10. Cost: two forward and backward passes per sequence and epoch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Options:
    eos_ids: tuple[int, ...]
    temperature: float = 1.0
    min_new_tokens: int = 0  # the EOS ids are impossible at the first so many response positions
    kl_coef: float = 0.05
    gamma: float = 1.0
    lam: float = 0.95
    truncation: str = "penalty"  # or "bootstrap" or "score"
    truncation_penalty: float = -1.0
    clip_score: float | None = None
    score_mean: float = 0.0
    score_std: float = 1.0
    value_mean: float = 0.0
    value_std: float = 1.0
    whiten: str = "mini_batch"  # or "batch"
    clip_ratio: float = 0.2
    importance_weights: str = "none"  # or "token" or "sequence"
    importance_cap: float = 2.0
    rejection: str = "none"  # or "token" or "sequence" or "geometric"
    rejection_range: tuple[float, float] | None = None
    clip_value: float = 0.2
    value_coef: float = 0.5
    actor_lr: float = 1e-3
    critic_lr: float = 1e-3
    num_warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-5
    weight_decay: float = 0.0
    max_grad_norm: float | None = None


@dataclass(frozen=True)
class Rollout:
    prompt: list[int]
    response: list[int]  # G tokens, the EOS included if it ended
    logprobs: list[float]  # G, of the policy before training
    ref_logprobs: list[float]  # G
    values: list[float]  # G + 1: entry t before response token t, the last one after the last token
    score: float
    generator: list[float] | None = None  # G, as the generator gave them; None: logprobs

    def ended(self, eos_ids: Sequence[int]) -> bool:
        return len(self.response) > 0 and self.response[-1] in eos_ids


@dataclass(frozen=True)
class Step:
    """The results of one mini-batch; gradients are before clipping."""

    policy_loss: float
    value_loss: float
    clip_fraction: float
    approx_kl: float
    actor_grads: dict[str, Tensor]
    critic_grads: dict[str, Tensor]
    actor_grad_norm: float
    critic_grad_norm: float


@dataclass
class AdamW:
    """Loshchilov and Hutter 2017, arXiv 1711.05101, algorithm 2, after a clip by global norm."""

    lr: float
    options: Options
    num_steps: int = 0
    first: dict[str, Tensor] = field(default_factory=dict)
    second: dict[str, Tensor] = field(default_factory=dict)

    def step(self, model: nn.Module, grads: dict[str, Tensor], grad_norm: float) -> None:
        o = self.options
        lr = self.lr
        if self.num_steps < o.num_warmup_steps:
            lr = self.lr * (self.num_steps + 1) / o.num_warmup_steps
        shrink = 1.0
        if o.max_grad_norm is not None and grad_norm > o.max_grad_norm:
            shrink = o.max_grad_norm / (grad_norm + 1e-6)  # the 1e-6 is torch's and DeepSpeed's
        self.num_steps += 1
        beta1, beta2 = o.betas
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                grad = grads[name] * shrink
                m = beta1 * self.first.get(name, torch.zeros_like(grad)) + (1 - beta1) * grad
                v = beta2 * self.second.get(name, torch.zeros_like(grad)) + (1 - beta2) * grad * grad
                self.first[name], self.second[name] = m, v
                m_hat = m / (1 - beta1**self.num_steps)
                v_hat = v / (1 - beta2**self.num_steps)
                parameter -= lr * o.weight_decay * parameter
                parameter -= lr * m_hat / (v_hat.sqrt() + o.eps)


def response_logprobs(logits: Callable, model: nn.Module, prompt: list[int], response: list[int], o: Options) -> list:
    """Returns log pi of every response token, as 0-dim tensors with gradients."""
    rows = logits(model, prompt + response)
    result = []
    for t, token in enumerate(response):
        row = rows[len(prompt) + t - 1] / o.temperature
        allowed = [v for v in range(len(row)) if t >= o.min_new_tokens or v not in o.eos_ids]
        top = float(row.detach().max())
        result.append(row[token] - top - torch.log(torch.exp(row[allowed] - top).sum()))
    return result


def sampling_support(row: list[float], t: int, o: Options, *, top_k: int, top_p: float, min_p: float) -> list[int]:
    """Returns the tokens that response token t is drawn from, in the order of their ids: of the top_k most likely ones
    the fewest whose share reaches top_p, and of these the ones at least min_p times as likely as the first."""
    allowed = [v for v in range(len(row)) if t >= o.min_new_tokens or v not in o.eos_ids]
    best = sorted(allowed, key=lambda v: row[v], reverse=True)[:top_k]
    weight = [math.exp((row[v] - row[best[0]]) / o.temperature) for v in best]
    kept = []
    for i, v in enumerate(best):
        if math.fsum(weight[:i]) < top_p * math.fsum(weight) and weight[i] >= min_p:
            kept.append(v)
    return sorted(kept)


def response_values(value: Callable, model: nn.Module, prompt: list[int], response: list[int]) -> list:
    """Returns V before every response token, and after the last: G + 1 0-dim tensors with gradients."""
    entries = value(model, prompt + response)
    return [entries[len(prompt) + t - 1] for t in range(len(response) + 1)]


def final_score(rollout: Rollout, o: Options) -> float:
    if not rollout.ended(o.eos_ids) and o.truncation != "score":
        return {"penalty": o.truncation_penalty, "bootstrap": 0.0}[o.truncation]
    score = (rollout.score - o.score_mean) / o.score_std
    if o.clip_score is not None:
        score = max(-o.clip_score, min(o.clip_score, score))
    return score


def rewards(rollout: Rollout, o: Options) -> list[float]:
    result = []
    for t in range(len(rollout.response)):
        reward = -o.kl_coef * (rollout.logprobs[t] - rollout.ref_logprobs[t])
        if t == len(rollout.response) - 1:
            reward += final_score(rollout, o)
        result.append(reward)
    return result


def advantages(rollout: Rollout, o: Options) -> list[float]:
    """Returns A_t = sum over l of (gamma lam)^l delta_{t+l}: the double sum of the paper."""
    num = len(rollout.response)
    goes_on = o.truncation == "bootstrap" and not rollout.ended(o.eos_ids)
    reward = rewards(rollout, o)

    def v(t: int) -> float:
        if t < num or goes_on:
            return rollout.values[t] * o.value_std + o.value_mean
        return 0.0

    def delta(t: int) -> float:
        return reward[t] + o.gamma * v(t + 1) - v(t)

    return [sum((o.gamma * o.lam) ** (s - t) * delta(s) for s in range(t, num)) for t in range(num)]


def whitened(per_sequence: list[list[float]]) -> list[list[float]]:
    """Returns mean 0 and (population) variance 1 over all tokens of all the sequences."""
    everything = [a for sequence in per_sequence for a in sequence]
    if not everything:
        return per_sequence
    mean = math.fsum(everything) / len(everything)
    variance = math.fsum((a - mean) ** 2 for a in everything) / len(everything)
    return [[(a - mean) / math.sqrt(variance + 1e-8) for a in sequence] for sequence in per_sequence]


def corrections(rollout: Rollout, o: Options) -> list[float]:
    """Returns what the surrogate of each token is multiplied by, where the generator is not the policy before
    training."""
    drawn = rollout.generator or rollout.logprobs
    logs = [old - generated for old, generated in zip(rollout.logprobs, drawn, strict=True)]
    result = []
    for log in logs:
        w = {"token": log, "sequence": math.fsum(logs), "geometric": math.fsum(logs) / len(logs)}
        factor = 1.0
        if o.importance_weights != "none":
            factor = min(math.exp(w[o.importance_weights]), o.importance_cap)
        if o.rejection != "none":
            usual = {"token": (0.5, 5.0), "sequence": (0.5, 2.0), "geometric": (0.999, 1.001)}
            low, high = o.rejection_range or usual[o.rejection]
            if not low <= math.exp(w[o.rejection]) <= high:
                factor = 0.0
        result.append(factor)
    return result


def policy_gradient(actor: nn.Module, logits: Callable, batch: list, o: Options) -> tuple[float, float, float, dict]:
    """Returns loss, clip fraction, approximate KL and gradients of one mini-batch of (rollout, whitened advantages)."""
    num_tokens = sum(len(rollout.response) for rollout, _ in batch)
    loss, num_clipped, kl = 0.0, 0, 0.0
    actor.zero_grad(set_to_none=True)
    for rollout, advantage in batch:
        terms = []
        new_logprobs = response_logprobs(logits, actor, rollout.prompt, rollout.response, o)
        factors = corrections(rollout, o)
        for new, old, a, factor in zip(new_logprobs, rollout.logprobs, advantage, factors, strict=True):
            ratio = torch.exp(new - old)
            r, low, high = ratio.item(), 1 - o.clip_ratio, 1 + o.clip_ratio
            # The surrogate has no gradient where clipping makes it worse for us than the free one would be.
            clipped = (a > 0 and r > high) or (a < 0 and r < low)
            terms.append(factor * (-a * (high if r > high else low) + 0 * new if clipped else -a * ratio))
            num_clipped += clipped
            kl += r - 1 - math.log(r)
        loss += backward(terms, num_tokens)
    return loss, num_clipped / num_tokens, kl / num_tokens, gradients(actor)


def value_gradient(critic: nn.Module, value: Callable, batch: list, o: Options) -> tuple[float, dict]:
    """Returns loss and gradients of one mini-batch of (rollout, returns)."""
    num_tokens = sum(len(rollout.response) for rollout, _ in batch)
    loss = 0.0
    critic.zero_grad(set_to_none=True)
    for rollout, target in batch:
        terms = []
        new_values = response_values(value, critic, rollout.prompt, rollout.response)[:-1]
        for new, old, goal in zip(new_values, rollout.values[:-1], target, strict=True):
            v = new.item()
            clipped = max(old - o.clip_value, min(old + o.clip_value, v))
            worse = (clipped - goal) ** 2 > (v - goal) ** 2
            terms.append(o.value_coef * ((clipped - goal) ** 2 + 0 * new if worse else (new - goal) ** 2))
        loss += backward(terms, num_tokens)
    return loss, gradients(critic)


def train(
    actor: nn.Module,
    critic: nn.Module,
    logits: Callable[[nn.Module, list[int]], Tensor],
    value: Callable[[nn.Module, list[int]], Tensor],
    rollouts: list[Rollout],
    order: Sequence[Sequence[Sequence[int]]],  # [epoch][mini-batch] -> indices into rollouts
    options: Options,
    actor_optimizer: AdamW | None = None,
    critic_optimizer: AdamW | None = None,
) -> list[Step]:
    """Trains all epochs and mini-batches of one iteration; the weights of actor and critic change in place.

    Hand in the optimizers to go on from an earlier iteration.
    """
    actor_optimizer = actor_optimizer or AdamW(options.actor_lr, options)
    critic_optimizer = critic_optimizer or AdamW(options.critic_lr, options)
    advantage = [advantages(rollout, options) for rollout in rollouts]
    target = [
        [a / options.value_std + v for a, v in zip(advantage[i], rollouts[i].values, strict=False)]
        for i in range(len(rollouts))
    ]
    if options.whiten == "batch":
        advantage = whitened(advantage)
    steps = []
    for epoch in order:
        for mini_batch in epoch:
            rows = [int(i) for i in mini_batch]
            white = [advantage[i] for i in rows]
            if options.whiten == "mini_batch":
                white = whitened(white)
            batch = [rollouts[i] for i in rows]
            policy_batch = list(zip(batch, white, strict=True))
            value_batch = list(zip(batch, (target[i] for i in rows), strict=True))
            policy_loss, clip_fraction, kl, actor_grads = policy_gradient(actor, logits, policy_batch, options)
            value_loss, critic_grads = value_gradient(critic, value, value_batch, options)
            norms = global_norm(actor_grads), global_norm(critic_grads)
            actor_optimizer.step(actor, actor_grads, norms[0])
            critic_optimizer.step(critic, critic_grads, norms[1])
            steps.append(Step(policy_loss, value_loss, clip_fraction, kl, actor_grads, critic_grads, *norms))
    return steps


def backward(terms: list[Tensor], num_tokens: int) -> float:
    """Adds the gradient of one sequence's share of the loss; returns that share."""
    if not terms:
        return 0.0
    share = torch.stack(terms).sum() / num_tokens
    share.backward()
    return share.item()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def global_norm(grads: dict[str, Tensor]) -> float:
    return math.sqrt(math.fsum(float(g) ** 2 for grad in grads.values() for g in grad.flatten()))
