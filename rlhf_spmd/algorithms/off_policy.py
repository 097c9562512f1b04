"""Options of every policy loss: what corrects it where the generator is not quite the policy that trains.

Old logprobs are those of the policy before training. The generator has the same weights, but another order of
summation, and in bfloat16 the two differ visibly. With w = exp(old logprob - generator's logprob), a loss is multiplied
by importance weights, at most a cap, and loses what `rejection` leaves out. The tensor math is `off_policy_weights` in
surrogates.py. No torch, no ranks.
"""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import PositiveFloat

from rlhf_spmd.algorithms import page
from rlhf_spmd.algorithms.page import ImportanceWeights, Metric, Rejection
from rlhf_spmd.plan.runtime_words import GENERATOR_LOGPROBS


@dataclass(frozen=True, slots=True)
class Options(page.Options):
    """Where old logprobs come from, and corrections."""

    # source of the old logprobs: the generator, or one more forward pass of the actor
    old_logprobs: Literal["generator", "recompute"] = "generator"
    # weight the loss by the ratio of recomputed to generator probabilities, per token or per sequence; none: do not
    importance_weights: ImportanceWeights = "none"
    # largest importance weight; larger ones are set to it; none: no limit
    importance_cap: PositiveFloat | None = 2.0
    # leave tokens out of the loss whose importance weight is outside rejection_range: by the token's weight, or by its
    # sequence's (the product, or geometric: the geometric mean); none: leave out none
    rejection: Rejection = "none"
    # smallest and largest importance weight that `rejection` keeps; none: the usual range for it
    rejection_range: tuple[PositiveFloat, PositiveFloat] | None = None


def corrects(options: Options) -> bool:
    """Whether the loss is corrected for differences between the generator and the training weights."""
    return options.importance_weights != "none" or options.rejection != "none"


def of_loss(options: Options, logprobs: Any) -> dict[str, Any]:
    """The argument of a loss that is to be corrected. logprobs: the generator's. The parity gate then logs differences
    and does not end the run."""
    return {GENERATOR_LOGPROBS: logprobs} if corrects(options) else {}


def problem(options: Options) -> str:
    """Why the options contradict each other; empty if they do not."""
    if corrects(options) and options.old_logprobs != "recompute":
        return (
            "importance_weights and rejection compare old logprobs with the generator's, and old_logprobs=generator "
            "makes them the same; set old_logprobs=recompute"
        )
    if options.rejection_range and options.rejection == "none":
        return "rejection_range is given, but rejection=none; choose rejection=token, sequence or geometric"
    if options.rejection_range and options.rejection_range[0] >= options.rejection_range[1]:
        return f"rejection_range={options.rejection_range}: the first number must be smaller than the second"
    return ""


FAR = "generator and trainer differ by more than rounding: compare with dtype=float32, and look at parity_mean_abs"
METRICS = {
    "importance_weight": Metric("policy", limits=(0.5, 2.0), advice=FAR),  # mean over tokens of what corrects the loss
    # largest weight before the cap and before rejection; without importance_weights the one that rejection looks at
    "importance_max": Metric("policy", over="max"),
    "importance_truncated": Metric("policy"),  # share of the tokens whose weight importance_cap lowers
    # effective sample size (sum f)^2 / (n sum f^2) of the factors f of all n tokens, which are 0 where rejected
    "importance_ess": Metric("policy"),
    "rejected": Metric("policy", limits=(0.0, 0.5), advice=FAR),  # share of the tokens that rejection leaves out
}
