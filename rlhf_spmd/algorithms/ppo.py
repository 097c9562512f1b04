"""PPO: roles, options, the workflow of one iteration, metrics and state. No torch, no ranks.

Schulman et al. 2017 (arXiv 1707.06347), as applied to language models by Ziegler et al. 2019 (arXiv 1909.08593). The
tensor math is in advantages.py and surrogates.py; the strategy decides which rank does what.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from rlhf_spmd.algorithms import off_policy
from rlhf_spmd.algorithms.controllers import RunningMoments, least_horizon, next_kl_coef
from rlhf_spmd.algorithms.page import Fraction01, Metric, NonNegative
from rlhf_spmd.plan.runtime_words import START_LOGPROBS
from rlhf_spmd.plan.workflow import ComputeFunction, Data, Models, Role

TITLE = "PPO"
DATA = {"prompts": "prompt"}
ROLES = {
    "actor": Role("lm", lr=1e-6, saved=True),
    "critic": Role("scalar", lr=5e-6, starts_from=("reward", "actor")),
    "reference": Role("lm", starts_from=("actor",)),
    "reward": Role("scalar", judge=True),
}


@dataclass(frozen=True, slots=True)
class Options(off_policy.Options):
    """Options of PPO. The defaults are the rules that the published reference implementations agree on."""

    epochs: PositiveInt = 4  # number of training passes over the rows of an iteration
    kl_coef: NonNegative = 0.05  # weight of the KL penalty on each token's reward; 0: none, but the reference infers
    kl_controller: Literal["fixed", "adaptive"] = "fixed"  # keep kl_coef (fixed), or adapt it to reach kl_target
    kl_target: PositiveFloat = 6.0  # KL divergence that the adaptive controller aims at, in nats per response
    kl_horizon: PositiveInt = 10_000  # horizon of the adaptive controller, in sequences; above 0.2 x an iteration's
    gamma: Fraction01 = 1.0  # discount factor of generalised advantage estimation (GAE)
    lam: Fraction01 = 0.95  # lambda of generalised advantage estimation (GAE)
    clip_ratio: PositiveFloat = 0.2  # distance from 1 at which the policy loss clips probability ratios
    clip_value: PositiveFloat = 0.2  # distance from its old value at which the value loss clips a value
    entropy_coef: NonNegative = 0.0  # bonus per nat of entropy of the distribution of each sampled token; 0: none
    whiten: Literal["mini_batch", "batch"] = "mini_batch"  # rows to whiten advantages over; batch: no streaming
    # reward of a response without an end of sequence: truncation_penalty, the critic's value (bootstrap), or its score
    truncation: Literal["penalty", "bootstrap", "score"] = "penalty"
    truncation_penalty: float = -1.0  # reward of a truncated response under truncation=penalty
    clip_score: PositiveFloat | None = None  # largest absolute score; larger ones are clipped to it; none: no limit
    normalize_scores: bool = False  # subtract the running mean of the scores, and divide by their standard deviation
    # let the critic predict returns less their running mean, divided by their standard deviation (ReaL's value_norm)
    normalize_values: bool = False
    # largest KL divergence from the policy at the start of an iteration's training, in nats per token; beyond it
    # further actor steps are skipped. With strategy.ahead=1 one more pass infers that policy; none: no limit
    kl_early_stop: PositiveFloat | None = None
    # largest mean of pi_new / pi_old in a mini-batch; beyond it further actor steps are skipped; none: no limit
    ratio_early_stop: PositiveFloat | None = None


def workflow(options: Options, model: Models, compute: ComputeFunction, prompts: Data) -> None:
    """Describes one iteration."""
    actor, critic, reference, reward = map(model, ("actor", "critic", "reference", "reward"))
    responses, logprobs = actor.generate(prompts)
    old = off_policy.old_logprobs(options, actor, prompts, responses, logprobs)
    ref_logprobs = reference.infer("logprobs", prompts, responses, output="ref_logprobs")
    scores = reward.infer("scores", prompts, responses)
    values = critic.infer("values", prompts, responses)
    advantages, returns = compute(
        "advantages.estimate_advantages",
        responses=responses,
        logprobs=old,
        ref_logprobs=ref_logprobs,
        scores=scores,
        values=values,
        makes={"advantages": "token", "returns": "token"},
        sums=options.whiten == "batch",
    )
    stop = ("approx_kl", options.kl_early_stop) if options.kl_early_stop else None
    start: dict[str, Any] = {START_LOGPROBS: old} if stop and options.old_logprobs != "loglinear" else {}
    if options.ratio_early_stop:
        stop = "ratio", options.ratio_early_stop
    entropy = options.entropy_coef > 0
    actor.train(
        "surrogates.policy_loss",
        prompts,
        responses,
        **off_policy.of_loss(options, logprobs, old),
        **start,
        advantages=advantages,
        entropy=entropy,
        stop=stop,
    )
    critic.train("surrogates.value_loss", prompts, responses, old_values=values, returns=returns)


def problem(options: Options, *, rollout_batch: int, samples_per_prompt: int) -> str:
    """Returns why these options make no sense together or with those of the run; empty if they do."""
    least = least_horizon(rollout_batch * samples_per_prompt)
    if options.kl_controller == "adaptive" and options.kl_horizon < least:
        return (
            f"kl_horizon={options.kl_horizon} is too short for kl_controller=adaptive: an iteration of rollout_batch "
            f"{rollout_batch} x samples_per_prompt {samples_per_prompt} = {rollout_batch * samples_per_prompt} "
            "sequences may lower kl_coef by the factor 1 - 0.2 x sequences / kl_horizon, which must be above 0; set "
            f"kl_horizon to at least {least}"
        )
    if options.kl_early_stop and options.ratio_early_stop:
        return "kl_early_stop and ratio_early_stop are two limits for the same steps: give one of them"
    return off_policy.problem(options)


def refused(options: Options, *, can_end: bool) -> str:
    """Returns why these options make no sense for a model whose responses cannot end early; empty if they do."""
    if can_end or options.truncation == "score":
        return ""
    return "every response would be cut off and get the penalty for that: choose ppo.truncation=score"


# ---- what changes between iterations --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class State:
    """State that is the same on every rank.

    score_moments, value_moments: of all scores so far, for normalize_scores, and of all returns, for normalize_values.
    """

    kl_coef: float
    score_moments: RunningMoments = RunningMoments()
    value_moments: RunningMoments = RunningMoments()


STATE_SUMS = ("kl", "used_score", "used_score_sq", "used_return", "used_return_sq")  # that after_iteration reads


def initial_state(options: Options) -> State:
    """Returns the state before the first iteration."""
    return State(options.kl_coef)


def read_state(values: Mapping[str, Any]) -> State:
    """Restores the state from the result of dataclasses.asdict."""

    def moments(name: str) -> RunningMoments:
        return RunningMoments(*(float(values[name][part]) for part in asdict(RunningMoments())))

    return State(float(values["kl_coef"]), moments("score_moments"), moments("value_moments"))


def after_iteration(
    state: State, options: Options, means: Mapping[str, float], weights: Mapping[str, float], num_sequences: int
) -> State:
    """Returns the next state, from global means of the iteration's sums, their weights, its number of sequences."""
    if options.kl_controller == "adaptive" and (num := weights.get("kl")):  # 0: all responses go on (partial_steps)
        kl_coef = next_kl_coef(state.kl_coef, means["kl"], num, target=options.kl_target, horizon=options.kl_horizon)
        state = replace(state, kl_coef=kl_coef)

    def updated(moments: RunningMoments, name: str) -> RunningMoments:
        weight = weights.get(name, 0.0)
        return moments.updated(weight, means[name] * weight, means[f"{name}_sq"] * weight) if weight else moments

    scores = updated(state.score_moments, "used_score")  # a truncated response has no score to normalise
    return replace(state, score_moments=scores, value_moments=updated(state.value_moments, "used_return"))


# ---- the log --------------------------------------------------------------------------------------------------------

ACTOR_LR, TOO_FAR = "lower optimizer.actor_lr", "lower optimizer.actor_lr or ppo.epochs"
METRICS = {
    # mean per response, after clipping, normalising and the rule for truncated responses
    "reward": Metric("reward", "reward", "{:+8.4f}", headline=""),
    "reward_std": Metric("reward", std_of="reward"),  # standard deviation over the responses
    # sum over a response of log pi_actor - log pi_reference, mean over responses, nats
    "kl": Metric(
        "reward",
        "kl",
        headline="nats per response",
        floor=2.0,
        advice="the actor leaves the reference: raise ppo.kl_coef or lower optimizer.actor_lr",
    ),
    "kl_per_token": Metric("reward"),  # the same, mean over tokens
    "kl_coef": Metric("reward"),  # weight of the KL penalty in this iteration
    "policy_loss": Metric(  # loss of the actor from the advantages, averaged as the algorithm says
        "policy", "policy", "{:+8.4f}", leaves=8, floor=1.0, advice=f"{ACTOR_LR}, or look at the rewards"
    ),
    "clip_fraction": Metric("policy", "clipped", "{:7.1%}", leaves=6),  # share of tokens whose loss is clipped
    "entropy": Metric("policy"),  # mean per token, nats, of the distribution sampled from; with ppo.entropy_coef
    # mean of pi_new / pi_old, which is 1 while the two are close
    "ratio": Metric("policy", limits=(0.5, 2.0), advice=f"the actor has left the policy that generated: {TOO_FAR}"),
    # mean over tokens of exp(d) - 1 - d, d = new - old logprob, nats; with kl_early_stop, from the start of training
    "approx_kl": Metric("policy", floor=0.1, advice=f"an iteration changes the actor too much: {TOO_FAR}"),
    "approx_kl_sq": Metric("policy"),  # mean over tokens of d^2 / 2
    "value_loss": Metric(  # mean per token of the loss of the critic
        "value", "value", leaves=5, floor=1.0, advice="lower optimizer.critic_lr, or scale the rewards"
    ),
    "value_clip_fraction": Metric("value"),  # share of tokens whose value loss is clipped
    "value_error_sq": Metric("value"),  # mean per token of (value - return)^2
    "value": Metric("value"),  # mean per token, when the rows were scored
    "return": Metric("value"),  # mean per token of what the critic is to learn
} | off_policy.METRICS
