"""What the algorithms without a critic share: options of the loss, roles and metrics. No torch, no ranks.

The loss is `surrogate_loss` (surrogates.py). grpo.py, rloo.py, remax.py and reinforce_plus_plus.py differ in their
advantages (group_advantages.py) and in their defaults.
"""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import PositiveFloat

from rlhf_spmd.algorithms import off_policy
from rlhf_spmd.algorithms.page import Aggregation, Metric, NonNegative, RatioLevel, Surrogate
from rlhf_spmd.plan.workflow import Data, Models, Role

ROLES = {
    "actor": Role("lm", lr=1e-6, saved=True),
    "reference": Role("lm", starts_from=("actor",)),
    "reward": Role("scalar", judge=True),
}


@dataclass(frozen=True, slots=True)
class Options(off_policy.Options):
    """Options of the policy loss."""

    kl_coef: NonNegative = 0.0  # weight of the KL divergence from the reference; 0: no reference is loaded
    # probability ratio of a token: its own, the geometric mean over its response (sequence), or their product
    ratio_level: RatioLevel = "token"
    # policy loss: clip (PPO); cispo, where clipped ratios are weights and every token has a gradient; dppo and
    # dppo_kl, which leave out tokens whose probability has moved too far; sapo, a soft gate; gmpo, the geometric mean
    # of a response's ratios; or reinforce, without a ratio
    surrogate: Surrogate = "clip"
    # probability ratios are clipped at 1 - clip_low, gmpo's logarithms at -clip_low; dppo drops tokens whose
    # probability has fallen by more than clip_low, dppo_kl those with a larger KL divergence
    clip_low: NonNegative = 0.2
    # probability ratios are clipped at 1 + clip_high, gmpo's logarithms at clip_high; dppo drops tokens whose
    # probability has risen by more than clip_high, dppo_kl those with a larger KL divergence
    clip_high: NonNegative = 0.2
    # temperatures of the gate of surrogate=sapo, for positive and for other advantages
    gate_temperatures: tuple[PositiveFloat, PositiveFloat] = (1.0, 1.05)
    # limit on the loss where an advantage A is negative: at most -dual_clip * A; none: no limit
    dual_clip: PositiveFloat | None = None
    # how the losses of tokens become one; seq-mean-token-sum-norm divides sums by the limit on a response
    aggregation: Aggregation = "token-mean"
    # weight of the bonus for entropy, in nats, of the distribution that a token was sampled from; 0: none
    entropy_coef: NonNegative = 0.0


def rollout(options: Options, model: Models, prompts: Data) -> tuple[Data, Data, dict[str, Any], dict[str, Any]]:
    """Generates and scores responses. Returns responses; their scores; arguments of advantages that need a KL
    divergence; arguments of the loss."""
    actor = model("actor")
    responses, logprobs = actor.generate(prompts)
    old = off_policy.old_logprobs(options, actor, prompts, responses, logprobs)
    loss = off_policy.of_loss(options, logprobs, old)
    kl: dict[str, Any] = {}
    if options.kl_coef > 0:
        kl = {"logprobs": old}
        kl["ref_logprobs"] = model("reference").infer("logprobs", prompts, responses, output="ref_logprobs")
    scores = model("reward").infer("scores", prompts, responses)
    return responses, scores, kl, loss


def divisor(options: Options) -> Literal["tokens", "responses"]:
    """Returns what the sum of the loss over a mini-batch is divided by."""
    return "tokens" if options.aggregation == "token-mean" else "responses"


def loss_problem(options: Options, *, kl_estimator: str | None = None, kl_unbiased: bool | None = None) -> str:
    """Returns why options of the loss contradict each other; empty if they do not. kl_estimator: where the KL
    divergence is a term of the loss. kl_unbiased: the option, of algorithms that have it."""
    if found := off_policy.problem(options):
        return found
    if options.ratio_level != "token" and options.importance_weights == "token":
        return (
            f"ratio_level={options.ratio_level} takes a response as a whole, importance_weights=token each of its "
            f"tokens; set importance_weights="
            f"{'geometric' if options.ratio_level == 'sequence' else 'sequence'}, or ratio_level=token"
        )
    if kl_estimator == "k1" and options.kl_coef > 0 and not kl_unbiased:
        others = "k2 or k3" if kl_unbiased is None else "k2 or k3, or kl_unbiased=true"
        return (
            "kl_estimator=k1 as a term of the loss has no gradient from the reference, so it would not keep the actor "
            f"near it; choose kl_estimator={others}"
        )
    if options.dual_clip is not None and options.dual_clip <= 1:
        return f"dual_clip={options.dual_clip}: it must be larger than 1, e.g. 3"
    if options.dual_clip is not None and options.surrogate != "clip":
        return f"dual_clip belongs to surrogate=clip, and surrogate={options.surrogate} has no use for it; drop one"
    if options.gate_temperatures != (1.0, 1.05) and options.surrogate != "sapo":
        return (
            f"gate_temperatures belongs to surrogate=sapo, not to surrogate={options.surrogate}; leave one of them out"
        )
    if options.ratio_level != "token" and options.surrogate in ("dppo", "dppo_kl", "gmpo", "reinforce"):
        return f"surrogate={options.surrogate} has no use for ratio_level={options.ratio_level}; leave one of them out"
    if options.surrogate == "clip" and options.clip_low > 1:
        return f"clip_low={options.clip_low}: ratios are positive, so it is at most 1"
    return ""


# ---- the log --------------------------------------------------------------------------------------------------------

ACTOR_LR, TOO_FAR = "lower optimizer.actor_lr", "lower optimizer.actor_lr or the number of epochs"
METRICS = {
    "reward": Metric("reward", "reward", "{:+8.4f}", headline=""),  # mean per response
    "reward_std": Metric("reward", std_of="reward"),  # over the responses of the iteration
    # sum over a response of log pi_actor - log pi_reference, mean over responses, nats; with kl_coef
    "kl": Metric(
        "reward",
        "kl",
        when=lambda options: options.kl_coef > 0,
        floor=2.0,
        advice="the actor leaves the reference: raise kl_coef or lower optimizer.actor_lr",
    ),
    "kl_per_token": Metric("reward"),
    "kl_loss": Metric("policy"),  # mean per token of the KL estimate in the loss
    "policy_loss": Metric(
        "policy", "policy", "{:+8.4f}", leaves=8, floor=1.0, advice=f"{ACTOR_LR}, or look at the rewards"
    ),
    "clip_fraction_low": Metric("policy"),  # tokens with a ratio below 1 - clip_low whose loss that changes
    "clip_fraction_high": Metric("policy", "clipped", "{:7.1%}", leaves=6),  # the same above 1 + clip_high
    "entropy": Metric("policy", "entropy", leaves=4),  # mean per token, nats, of the distribution sampled from
    # mean of pi_new / pi_old, which is 1 while the two are close
    "ratio": Metric("policy", limits=(0.5, 2.0), advice=f"the actor has left the policy that generated: {TOO_FAR}"),
    # mean over tokens of exp(d) - 1 - d, d = new - old logprob, nats
    "approx_kl": Metric("policy", floor=0.1, advice=f"an iteration changes the actor too much: {TOO_FAR}"),
} | off_policy.METRICS
