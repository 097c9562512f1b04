"""Options of every policy loss: what corrects it where the generator is not quite the policy that trains.

Old logprobs are those of the policy before training. The generator has the same weights, but another order of
summation, and in bfloat16 the two differ visibly. With w = exp(old logprob - generator's logprob), a loss is multiplied
by importance weights, at most a cap, and loses what `rejection` leaves out. Where batches are sampled one iteration
ahead, the generator is also older. Only old logprobs of the policy with which training begins can show that: those of a
pass (current), or an estimate of them (loglinear). The tensor math is in importance.py. No torch, no ranks.
"""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import PositiveFloat

from rlhf_spmd.algorithms import page
from rlhf_spmd.algorithms.page import ImportanceWeights, Metric, Rejection
from rlhf_spmd.plan.runtime_words import GENERATOR_LOGPROBS
from rlhf_spmd.plan.workflow import Data, Model


@dataclass(frozen=True, slots=True)
class Options(page.Options):
    """Where old logprobs come from, and corrections."""

    # source of the old logprobs: the generator, or one more forward pass of the actor, with the weights that generated
    # (recompute) or those with which training begins (current; older only with strategy.ahead=1); loglinear: between
    # generator's and current logprobs, without a pass (with strategy.ahead=1)
    old_logprobs: Literal["generator", "recompute", "current", "loglinear"] = "generator"
    # weight the loss by the ratio of old to generator probabilities, of a token or of its sequence (the product, or
    # geometric: the geometric mean); none: do not
    importance_weights: ImportanceWeights = "none"
    # largest importance weight; larger ones are set to it; none: no limit
    importance_cap: PositiveFloat | None = 2.0
    # leave tokens out of the loss whose importance weight is outside rejection_range: by the token's weight, or by its
    # sequence's (the product, or geometric: the geometric mean); none: leave out none
    rejection: Rejection = "none"
    # smallest and largest importance weight that `rejection` keeps; none: the usual range for it
    rejection_range: tuple[PositiveFloat, PositiveFloat] | None = None
    # leave tokens out of the loss whose ratio of new to generator probabilities is beyond the clip range on the side of
    # their advantage, as old_logprobs=generator does; with importance_weights or rejection
    generator_clip: bool = False


def corrects(options: Options) -> bool:
    """Returns whether the loss is corrected for differences between the generator and the training weights."""
    return options.importance_weights != "none" or options.rejection != "none"


def old_logprobs(options: Options, actor: Model, prompts: Data, responses: Data, logprobs: Data) -> Data:
    """Returns the old logprobs of responses, as advantages read them: of a pass of the actor, or the generator's
    `logprobs`."""
    if options.old_logprobs not in ("recompute", "current"):
        return logprobs
    is_current = options.old_logprobs == "current"
    return actor.infer("logprobs", prompts, responses, output="old_logprobs", current=is_current)


def of_loss(options: Options, logprobs: Data, old: Data) -> dict[str, Any]:
    """Returns the arguments of a loss with which responses are compared. If the loss is corrected, the parity
    gate logs differences and does not end the run.

    logprobs: the generator's.
    old: those of `old_logprobs`.
    """
    generator = {GENERATOR_LOGPROBS: logprobs} if corrects(options) else {}
    return generator | {"old_logprobs": old, "loglinear": options.old_logprobs == "loglinear"}


def problem(options: Options) -> str:
    """Returns why the options contradict each other; empty if they do not."""
    if corrects(options) and options.old_logprobs == "generator":
        return (
            "importance_weights and rejection compare old logprobs with the generator's, and old_logprobs=generator "
            "makes them the same, so that its difference would count twice, in weights and ratios; set "
            "old_logprobs=recompute, or with strategy.ahead=1 current or loglinear"
        )
    if not corrects(options) and options.old_logprobs == "loglinear":
        return (
            "old_logprobs=loglinear is the proximal policy of a loss with weights; set importance_weights or "
            "rejection, or old_logprobs=generator"
        )
    if not corrects(options) and options.generator_clip:
        return (
            "generator_clip=true is for a loss with importance_weights or rejection, and this one has neither; set "
            "importance_weights=token, or old_logprobs=generator, which clips ratios to the generator itself"
        )
    if options.rejection_range and options.rejection == "none":
        return "rejection_range is given, but rejection=none; choose rejection=token, sequence or geometric"
    if options.rejection_range and options.rejection_range[0] >= options.rejection_range[1]:
        return f"rejection_range={options.rejection_range}: the first number must be smaller than the second"
    return ""


FAR = (
    "generator and trainer differ by more than rounding: compare with dtype=float32, and look at parity_mean_abs, or "
    "with strategy.ahead=1 at lag_mean_abs"
)
METRICS = {
    "importance_weight": Metric("policy", limits=(0.5, 2.0), advice=FAR),  # mean over tokens of what corrects the loss
    # largest weight before the cap and before rejection; without importance_weights the one that rejection looks at
    "importance_max": Metric("policy", over="max"),
    "importance_truncated": Metric("policy"),  # share of the tokens whose weight importance_cap lowers
    # effective sample size (sum f)^2 / (n sum f^2) of the factors f of all n tokens, which are 0 where rejected
    "importance_ess": Metric("policy"),
    "rejected": Metric("policy", limits=(0.0, 0.5), advice=FAR),  # share of the tokens that rejection leaves out
    "generator_clip_fraction": Metric("policy"),  # share of the tokens that generator_clip leaves out
}
