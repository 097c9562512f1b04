"""REINFORCE++: rewards to go, whitened over all tokens of the batch, with PPO's clip. No torch, no ranks.

Hu et al. 2025 (arXiv 2501.03262). baseline=group first subtracts the mean of a prompt's samples; the paper then advises
kl_in=loss kl_estimator=k2. The tensor math is in group_advantages.py and surrogates.py.
"""

from dataclasses import dataclass
from typing import Literal

from rlhf_spmd.algorithms import policy_gradient
from rlhf_spmd.algorithms.page import KLEstimator, NonNegative
from rlhf_spmd.plan.workflow import ComputeFunction, Data, Models

TITLE = "REINFORCE++"
DATA = {"prompts": "prompt"}
ROLES = policy_gradient.ROLES
METRICS = policy_gradient.METRICS


@dataclass(frozen=True, slots=True)
class Options(policy_gradient.Options):
    """Options of REINFORCE++."""

    kl_coef: NonNegative = 0.01  # weight of the KL divergence from the reference; 0: no reference is loaded
    # where the KL divergence counts: subtracted from each token's reward, or as a term of the loss
    kl_in: Literal["reward", "loss"] = "reward"
    # estimator of the KL divergence in the loss, from d = logprob - reference logprob: k2 is d^2/2, k3 is exp(-d) + d -
    # 1
    kl_estimator: KLEstimator = "k2"
    # subtract from each score the mean over the samples of its prompt (group); none: do not
    baseline: Literal["none", "group"] = "none"


def workflow(options: Options, model: Models, compute: ComputeFunction, prompts: Data) -> None:
    """Describes one iteration. Whitening needs the whole batch, so nothing streams."""
    responses, scores, kl, loss = policy_gradient.rollout(options, model, prompts)
    advantages = compute(
        "group_advantages.batch_advantages",
        responses=responses,
        scores=scores,
        makes={"advantages": "token"},
        scope="group" if options.baseline == "group" else "row",
        sums=True,
        **(kl if options.kl_in == "reward" else {}),
    )
    if kl and options.kl_in == "loss":
        loss["ref_logprobs"] = kl["ref_logprobs"]
    divisor = policy_gradient.divisor(options)
    model("actor").train(
        "surrogates.surrogate_loss", prompts, responses, advantages=advantages, divisor=divisor, entropy=True, **loss
    )


def problem(options: Options, *, samples_per_prompt: int) -> str:
    """Returns why these options make no sense together or with those of the run; empty if they do."""
    if options.baseline == "group" and samples_per_prompt < 2:
        return "baseline=group is the mean of a prompt's samples: set samples_per_prompt=4, or at least 2"
    return policy_gradient.loss_problem(options, kl_estimator=options.kl_estimator if options.kl_in == "loss" else None)
