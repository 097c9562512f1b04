"""The math of PPO against the second, slow implementation: losses and gradients agree to 1e-10 in float64, however rows
are shared. (test_slow_twin.py has whole runs.)

The fast side of these tests is what a rank does: padded batches, shares and micro-batches whose sums are added, and
division by the global token count.
"""

import dataclasses
import functools
import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rlhf_spmd.algorithms.advantages import gae, moments, shaped_scores, token_kl, token_rewards, whitened
from rlhf_spmd.algorithms.masks import ended, response_mask
from rlhf_spmd.algorithms.surrogates import policy_loss, value_loss
from tests import slow_ppo

VOCAB, HIDDEN, EOS = 11, 6, 3
OPTIONS = slow_ppo.Options(eos_ids=(EOS,))
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


class Recurrent(nn.Module):
    """The smallest causal sequence model: right padding can't reach back."""

    def __init__(self, width: int, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.rnn = nn.Embedding(VOCAB, HIDDEN), nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, width)
        self.double()

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(tokens_BT))[0])


def logits(actor: nn.Module, tokens: list[int]) -> Tensor:
    return actor(torch.tensor([tokens]))[0]


def value(critic: nn.Module, tokens: list[int]) -> Tensor:
    return critic(torch.tensor([tokens]))[0, :, 0]


def models(seed: int = 0) -> tuple[nn.Module, nn.Module]:
    return Recurrent(VOCAB, seed), Recurrent(1, seed + 1)


def make_rollouts(num: int, options: slow_ppo.Options, *, noise: float = 0.2) -> list[slow_ppo.Rollout]:
    """Returns responses of 1 to 7 tokens, some ended; old logprobs and values a little off, so that things are
    clipped."""
    rng = np.random.default_rng(0)
    actor, critic = models()
    words = [v for v in range(VOCAB) if v not in options.eos_ids]
    rollouts = []
    for i in range(num):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 5)).tolist()
        response = rng.choice(words, rng.integers(1 + options.min_new_tokens, 8)).tolist()
        if i % 3:
            response[-1] = EOS
        num_tokens = len(response)
        with torch.no_grad():
            exact = slow_ppo.response_logprobs(logits, actor, prompt, response, options)
            values = slow_ppo.response_values(value, critic, prompt, response)
        logprobs = np.array([float(x) for x in exact]) + noise * rng.standard_normal(num_tokens)
        ref_logprobs = logprobs + 0.3 * rng.standard_normal(num_tokens)
        values = np.array([float(x) for x in values]) + noise * rng.standard_normal(num_tokens + 1)
        score = float(2 * rng.standard_normal())
        rollouts.append(
            slow_ppo.Rollout(prompt, response, logprobs.tolist(), ref_logprobs.tolist(), values.tolist(), score)
        )
    return rollouts


@dataclasses.dataclass
class Batch:
    """The rollouts as padded tensors."""

    tokens_BT: Tensor
    prompt_len_B: Tensor
    responses_BG: Tensor
    logprobs_BG: Tensor
    advantages_BG: Tensor
    returns_BG: Tensor
    values_BG1: Tensor
    white_BG: Tensor | None = None

    def rows(self, index) -> "Batch":
        return Batch(*(None if x is None else x[index] for x in dataclasses.astuple(self)))


def pad(rows: list[list], width: int, filler: float, dtype=torch.float64) -> Tensor:
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows], dtype=dtype)


def make_batch(rollouts: list, o: slow_ppo.Options) -> Batch:
    """Returns everything up to the advantages, as the runtime does it."""
    width = max(len(r.response) for r in rollouts)
    tokens = [r.prompt + r.response for r in rollouts]
    tokens_BT = pad(tokens, max(map(len, tokens)), 0, torch.int64)
    responses_BG = pad([r.response for r in rollouts], width, -1, torch.int64)
    logprobs_BG, ref_BG = (pad([getattr(r, n) for r in rollouts], width, 0.0) for n in ("logprobs", "ref_logprobs"))
    values_BG1 = pad([r.values for r in rollouts], width + 1, 0.0)
    mask_BG, ended_B = response_mask(responses_BG), ended(responses_BG, o.eos_ids)
    scores_B = shaped_scores(
        torch.tensor([r.score for r in rollouts], dtype=torch.float64),
        ended_B,
        truncation=o.truncation,
        truncation_penalty=o.truncation_penalty,
        clip_score=o.clip_score,
        mean=o.score_mean,
        std=o.score_std,
    )
    rewards_BG = token_rewards(scores_B, token_kl(logprobs_BG, ref_BG, mask_BG), mask_BG, o.kl_coef)
    bootstrap_B = ~ended_B if o.truncation == "bootstrap" else None
    advantages_BG, returns_BG = gae(rewards_BG, values_BG1, mask_BG, gamma=o.gamma, lam=o.lam, bootstrap_B=bootstrap_B)
    prompt_len_B = torch.tensor([len(r.prompt) for r in rollouts])
    return Batch(tokens_BT, prompt_len_B, responses_BG, logprobs_BG, advantages_BG, returns_BG, values_BG1)


def whiten(batch: Batch, shares: list[list[int]]) -> Batch:
    """Whitens with the moments of every share, added; then the same mean and variance for all."""
    mask_BG = response_mask(batch.responses_BG)
    total = sum(moments(batch.advantages_BG[rows], mask_BG[rows]) for rows in shares)
    return dataclasses.replace(batch, white_BG=whitened(batch.advantages_BG, mask_BG, total))


def at_responses(x_BT: Tensor, batch: Batch) -> Tensor:
    """Returns what the model says *before* each response token: [B, T, ...] -> [B, G, ...]."""
    offset_BG = batch.prompt_len_B[:, None] - 1 + torch.arange(batch.responses_BG.shape[1])
    return x_BT[torch.arange(len(x_BT))[:, None], offset_BG.clamp(max=x_BT.shape[1] - 1)]


def with_one_more(x_BG: Tensor) -> Tensor:
    """Adds a column of values after the last token, which the loss does not read."""
    return torch.cat([x_BG, x_BG.new_full((len(x_BG), 1), math.nan)], 1)


def losses(actor, critic, batch: Batch, o: slow_ppo.Options):
    """Sums over one share or micro-batch of a whitened mini-batch."""
    mask_BG = response_mask(batch.responses_BG)
    logits_BGV = at_responses(actor(batch.tokens_BT), batch) / o.temperature
    logits_BGV[:, : o.min_new_tokens, list(o.eos_ids)] = -torch.inf
    index_BG1 = batch.responses_BG.clamp(min=0)[..., None]
    logprobs_BG = torch.where(mask_BG, logits_BGV.log_softmax(2).gather(2, index_BG1)[..., 0], 0.0)
    values_BG1 = with_one_more(at_responses(critic(batch.tokens_BT)[..., 0], batch))
    policy = policy_loss(logprobs_BG, batch.logprobs_BG, batch.white_BG, mask_BG, clip_ratio=o.clip_ratio)
    critic_loss = value_loss(
        values_BG1, batch.values_BG1, batch.returns_BG, mask_BG, clip_value=o.clip_value, value_coef=o.value_coef
    )
    return policy, critic_loss


def fast_step(actor, critic, batch: Batch, shares: list[list[int]], o: slow_ppo.Options) -> slow_ppo.Step:
    """Returns losses and gradients of one (whitened) mini-batch, one share after the other."""
    num_tokens = response_mask(batch.responses_BG).sum()
    actor.zero_grad()
    critic.zero_grad()
    totals: dict[str, float] = {}
    for rows in shares:
        own = batch.rows(rows)
        if not rows:  # a rank without data: one row without a token
            own = dataclasses.replace(batch.rows([0]), responses_BG=torch.full_like(batch.responses_BG[:1], -1))
        for loss_sum, sums in losses(actor, critic, own, o):
            (loss_sum / num_tokens).backward()
            for name, (x, _) in sums.items():
                totals[name] = totals.get(name, 0.0) + float(x / num_tokens)
    grads = [{n: p.grad.clone() for n, p in model.named_parameters()} for model in (actor, critic)]
    norms = [math.sqrt(sum(float(g.square().sum()) for g in grad.values())) for grad in grads]
    return slow_ppo.Step(
        totals["policy_loss"], totals["value_loss"], totals["clip_fraction"], totals["approx_kl"], *grads, *norms
    )


def assert_same(fast: slow_ppo.Step, slow: slow_ppo.Step) -> None:
    for name in (f.name for f in dataclasses.fields(slow_ppo.Step)):
        torch.testing.assert_close(getattr(fast, name), getattr(slow, name), **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


def one_mini_batch(rollouts, o=OPTIONS) -> slow_ppo.Step:
    """Returns all rollouts as one mini-batch, by the slow implementation."""
    return slow_ppo.train(*models(), logits, value, rollouts, [[range(len(rollouts))]], o)[0]


@functools.cache
def seven_rollouts() -> tuple[list[slow_ppo.Rollout], slow_ppo.Step]:
    rollouts = make_rollouts(7, OPTIONS)
    return rollouts, one_mini_batch(rollouts)


@given(st.integers(1, 9), st.data())
@settings(max_examples=8, deadline=None)
def test_invariant_2_any_split(num_shares, data):
    """Any rows on any share, shares without a row included: the loss and the gradient of the whole mini-batch."""
    rollouts, expected = seven_rollouts()
    owners = data.draw(st.lists(st.integers(0, num_shares - 1), min_size=7, max_size=7))
    shares = [[row for row in range(7) if owners[row] == share] for share in range(num_shares)]
    batch = whiten(make_batch(rollouts, OPTIONS), shares)
    assert_same(fast_step(*models(), batch, shares, OPTIONS), expected)
