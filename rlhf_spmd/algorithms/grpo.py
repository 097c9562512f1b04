"""GRPO and its variants: a response is compared with the other samples of its prompt. No torch, no ranks.

Shao et al. 2024 (arXiv 2402.03300). Options make it one of VARIANTS. The tensor math is in group_advantages.py and
surrogates.py.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from rlhf_spmd.algorithms import policy_gradient
from rlhf_spmd.algorithms.page import KLEstimator, Metric, NonNegative, Variant
from rlhf_spmd.plan.runtime_words import rewards_of
from rlhf_spmd.plan.workflow import ComputeFunction, Data, Models

TITLE = "GRPO"
DATA = {"prompts": "prompt"}
ROLES = policy_gradient.ROLES
SAMPLES_PER_PROMPT = 8
SEQUENCES = "aggregation=seq-mean-token-mean"
VARIANTS = (
    Variant("GRPO as in the paper", f"{SEQUENCES} kl_coef=0.04", "mean over responses of their mean", "2402.03300"),
    Variant("Dr.GRPO", "scale=none aggregation=seq-mean-token-sum-norm", "A = r - mean of the group", "2503.20783"),
    Variant(
        "DAPO",
        "clip_high=0.28 drop_equal_groups=true rounds=10 overlong=shape overlong_buffer=TOKENS",
        "min(u A, clip(u, 0.8, 1.28) A)",
        "2503.14476",
    ),
    Variant(
        "GSPO",
        f"ratio_level=sequence {SEQUENCES} clip_low=3e-4 clip_high=4e-4",
        "u is the geometric mean of a response's ratios",
        "2507.18071",
    ),
    Variant("CISPO", "surrogate=cispo clip_low=1 clip_high=4", "sg(clip(u, 0, 5)) A log pi", "2506.13585"),
    Variant(
        "SAPO", f"surrogate=sapo {SEQUENCES}", "(4 / t) sigmoid(t (u - 1)) A, t 1 if A > 0, else 1.05", "2511.20347"
    ),
    Variant(
        "GMPO",
        f"surrogate=gmpo {SEQUENCES} clip_low=0.4 clip_high=0.4",
        "A times the geometric mean of a response's ratios, each clipped at exp(0.4) if A > 0, else at exp(-0.4)",
        "2507.20673",
    ),
    Variant(
        "DPPO",
        "surrogate=dppo",
        "sg(min(u, 20)) A log pi, without tokens whose probability moved over 0.2 in A's direction",
        "2602.04879",
    ),
    Variant(
        "DPPO by KL",
        "surrogate=dppo_kl",
        "the same; the limit of 0.2 is on the KL divergence of (token, all others)",
        "2602.04879",
    ),
    Variant("two-sided clip", "dual_clip=3", "the term is at least 3 A if A < 0 (TRL's `delta`)", "1912.09729"),
    Variant("GPG", "surrogate=reinforce scale=none drop_equal_groups=true", "A log pi", "2504.02546"),
    Variant("MaxRL", "scale=mean", "A = (r - mean of the group) / mean of the group", "2602.02710"),
    Variant("KL in the reward", "kl_in=reward kl_coef=0.001", "r - kl_coef * sum of log(pi / reference)", "verl"),
)
Factor = Annotated[float, Field(ge=1)]
Rounds = Annotated[int, Field(ge=1, le=10)]


@dataclass(frozen=True, slots=True)
class Options(policy_gradient.Options):
    """Options of GRPO."""

    # the KL divergence is a term of the loss, or taken off the reward of a response, times kl_coef
    kl_in: Literal["loss", "reward"] = "loss"
    # estimator of the KL divergence from d = logprob - reference logprob: k1 is d (with kl_unbiased), k2 is d^2/2, k3
    # is exp(-d) + d - 1
    kl_estimator: KLEstimator = "k3"
    # multiply the KL term by the probability ratio, so that its gradient is that of the KL divergence
    kl_unbiased: bool = False
    # divide advantages by the standard deviation of rewards, in the group or in the batch, or by the group's mean
    # reward; none: do not
    scale: Literal["group", "batch", "mean", "none"] = "group"
    scale_eps: PositiveFloat = 1e-4  # constant added to what divides advantages
    # what to do with long responses: keep them, shape (lower their reward), or mask (leave truncated ones out)
    overlong: Literal["keep", "shape", "mask"] = "keep"
    # length in tokens, before the limit, over which overlong=shape lowers the reward; 0: none
    overlong_buffer: NonNegativeInt = 0
    overlong_penalty: NonNegative = 1.0  # reward that overlong=shape takes off at the limit
    drop_equal_groups: bool = False  # leave groups whose rewards are all equal out of the loss
    # give each turn of an episode the rewards from this turn on, instead of the sum over all turns; with scale=none and
    # an environment
    turn_rewards: bool = False
    # smallest number of groups left in an iteration, below which the run ends; 0: no limit; above 0 there is no
    # streaming
    min_groups: NonNegativeInt = 0
    # number of groups that a mini-batch generates for each group that it trains on; the first ones left are used; 1:
    # trains on all
    oversampling: Factor = 1.0
    # largest number of times that an iteration samples: groups with equal rewards are replaced by groups of further
    # prompts until no such group remains; 1: once
    rounds: Rounds = 1


def workflow(options: Options, model: Models, compute: ComputeFunction, prompts: Data) -> None:
    """Describes one iteration."""
    responses, scores, kl, loss = policy_gradient.rollout(options, model, prompts)
    if options.rounds > 1:
        makes = {"equal": "row"}
        compute("equal_groups", responses=responses, scores=scores, makes=makes, scope="group", rounds=options.rounds)
    advantages, used = compute(
        "group_advantages.group_advantages",
        responses=responses,
        scores=scores,
        makes={"advantages": "row", "used": "row"},
        scope="group",
        sums=options.scale == "batch" or options.min_groups > 0,
        **(kl if options.kl_in == "reward" else {}),
    )
    if options.turn_rewards:
        advantages = compute(
            "turn_advantages",
            responses=responses,
            advantages=advantages,
            turn_rewards=Data(rewards_of(responses.key)),
            makes={"turn_advantages": "token"},
        )
    if kl and options.kl_in == "loss":
        loss["ref_logprobs"] = kl["ref_logprobs"]
    if options.oversampling > 1:
        starts = compute("group_starts", scores=scores, makes={"starts": "row"}, scope="group")
        used = compute("first_groups", used=used, starts=starts, makes={"trained": "row"}, scope="mini_batch")
    model("actor").train(
        "surrogates.surrogate_loss",
        prompts,
        responses,
        advantages=advantages,
        only=used if leaves_out(options) else None,
        divisor=policy_gradient.divisor(options),
        entropy=True,
        **loss,
    )


def leaves_out(options: Options) -> bool:
    """Returns whether some responses may be left out of the loss."""
    return options.drop_equal_groups or options.overlong == "mask"


def problem(options: Options, *, samples_per_prompt: int, mini_batch: int, max_new_tokens: int) -> str:
    """Returns why these options make no sense together or with those of the run; empty if they do."""
    if samples_per_prompt < 2:
        return "a response is compared with the others of its prompt: set samples_per_prompt=8, or at least 2"
    if (options.overlong == "shape") != (options.overlong_buffer > 0):
        return "overlong=shape and overlong_buffer=TOKENS belong together; give both, or none"
    if options.overlong_buffer > max_new_tokens:
        return f"overlong_buffer={options.overlong_buffer} is more than generation.max_new_tokens={max_new_tokens}"
    if options.turn_rewards and options.scale != "none":
        return f"turn_rewards=true needs scale=none, not {options.scale}: a group's spread is that of whole episodes"
    if options.rounds > 1 and not options.drop_equal_groups:
        return "rounds sample groups with equal rewards again: set drop_equal_groups=true, or leave rounds out"
    if options.oversampling > 1:
        wanted = mini_batch / samples_per_prompt / options.oversampling
        if not leaves_out(options):
            return (
                "oversampling replaces groups that are dropped: set drop_equal_groups=true, or leave oversampling out"
            )
        if mini_batch % samples_per_prompt or round(wanted) < 1 or abs(wanted - round(wanted)) > 1e-6:
            return (
                f"oversampling={options.oversampling:g}: a mini-batch of {mini_batch} responses has "
                f"{mini_batch / samples_per_prompt:g} groups of samples_per_prompt={samples_per_prompt}, of which "
                f"{wanted:g} would be trained on; choose mini_batch so that both are whole numbers"
            )
    if options.kl_in == "reward":
        if not options.kl_coef or options.kl_unbiased:
            return "kl_in=reward takes kl_coef times the KL divergence off the reward: set kl_coef, and not kl_unbiased"
        return policy_gradient.loss_problem(options)
    return policy_gradient.loss_problem(options, kl_estimator=options.kl_estimator, kl_unbiased=options.kl_unbiased)


def refused(options: Options, *, can_end: bool) -> str:
    """Returns why these options make no sense for a model whose responses cannot end early; empty if they do."""
    if can_end or options.overlong == "keep":
        return ""
    return "every response would be truncated: choose grpo.overlong=keep"


METRICS = policy_gradient.METRICS | {
    "group_std": Metric("reward"),  # mean over groups of the standard deviation of their rewards
    "equal_groups": Metric("reward", "equal", "{:7.1%}", leaves=3),  # share of the groups whose rewards are all equal
    "used": Metric("reward"),  # share of the responses that are not left out, before those left over by oversampling
    # mean per mini-batch; with oversampling
    "trained_groups": Metric("reward", "groups", "{:7.2f}", when=lambda options: options.oversampling > 1, leaves=5),
    # share of the mini-batches with fewer groups than oversampling is to give
    "short_steps": Metric(
        "reward", limits=(0.0, 0.25), advice="too few groups differ: raise oversampling together with mini_batch"
    ),
}
