"""PPO as it is written in papers: the workflow of one iteration, and its options. No torch, no ranks.

Schulman et al. 2017 (arXiv 1707.06347), as applied to language models by Ziegler et al. 2019 (arXiv 1909.08593).
The tensor math is in ppo_math.py; which rank does what is the strategy's business.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from rlhf_spmd.plan.workflow import Workflow, trace

NonNegative = Annotated[float, Field(ge=0)]
Fraction01 = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class PPO:
    """Options of PPO. The defaults are the rules that the published reference implementations agree on."""

    epochs: PositiveInt = 4  # passes over the rows of an iteration
    kl_coef: NonNegative = 0.05  # weight of the KL penalty that is subtracted from each token's reward
    kl_controller: Literal["fixed", "adaptive"] = "fixed"  # adaptive changes kl_coef between iterations
    kl_target: PositiveFloat = 6.0  # target of the adaptive controller, nats per response
    kl_horizon: PositiveInt = 10_000  # horizon of the adaptive controller, sequences
    gamma: Fraction01 = 1.0  # discount of GAE
    lam: Fraction01 = 0.95  # lambda of GAE
    clip_ratio: PositiveFloat = 0.2  # range of the probability ratio around 1 in the policy loss
    clip_value: PositiveFloat = 0.2  # range of a value around its old value in the value loss
    entropy_coef: NonNegative = 0.0  # bonus per nat of entropy of the distribution that a token was sampled from
    whiten: Literal["mini_batch", "batch"] = "mini_batch"  # where advantages are whitened; batch: no streaming
    old_logprobs: Literal["generator", "recompute"] = "generator"  # recompute: another forward pass of the actor
    truncation: Literal["penalty", "bootstrap", "score"] = "penalty"  # reward of a response without an end of sequence
    truncation_penalty: float = -1.0  # the reward under truncation=penalty
    clip_score: PositiveFloat | None = None  # scores are clipped to this range around 0
    normalize_scores: bool = False  # subtract the running mean of the scores, divide by their standard deviation
    kl_early_stop: PositiveFloat | None = None  # nats per token that end the iteration's actor steps early


def workflow(options: PPO, *, replay: bool = False) -> Workflow:
    """The graph of one PPO iteration; `replay`: sampling is restricted (top-k, ...), and its sets are replayed."""

    def ppo(model: Callable, compute: Callable, prompts) -> None:
        actor, critic, reference, reward = map(model, ("actor", "critic", "reference", "reward"))
        responses, logprobs, *kept = actor.generate(prompts, replay=replay)
        generated = []  # what the parity gate compares, where training itself uses others
        if options.old_logprobs == "recompute":
            generated = [logprobs]
            logprobs = actor.infer("logprobs", prompts, responses, *kept, output="old_logprobs")
        ref_logprobs = reference.infer("logprobs", prompts, responses, *kept, output="ref_logprobs")
        scores = reward.infer("scores", prompts, responses)
        values = critic.infer("values", prompts, responses)
        advantages, returns = compute(
            "estimate_advantages", (responses, logprobs, ref_logprobs, scores, values), ("advantages", "returns")
        )
        actor.train("policy_loss", prompts, responses, logprobs, advantages, *generated, *kept)
        critic.train("value_loss", prompts, responses, values, returns)

    return trace(ppo)
