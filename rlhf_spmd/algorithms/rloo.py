"""RLOO: REINFORCE with the mean of a prompt's other samples as the baseline. No torch, no ranks.

Ahmadian et al. 2024 (arXiv 2402.14740). The KL divergence from the reference comes off the reward before the baseline.
The tensor math is in group_advantages.py and surrogates.py.
"""

from dataclasses import dataclass

from rlhf_spmd.algorithms import policy_gradient
from rlhf_spmd.algorithms.page import NonNegative
from rlhf_spmd.plan.workflow import ComputeFunction, Data, Models

TITLE = "RLOO"
DATA = {"prompts": "prompt"}
ROLES = policy_gradient.ROLES
SAMPLES_PER_PROMPT = 4
METRICS = {name: metric for name, metric in policy_gradient.METRICS.items() if name != "kl_loss"}


@dataclass(frozen=True, slots=True)
class Options(policy_gradient.Options):
    """Options of RLOO."""

    kl_coef: NonNegative = 0.05  # weight of the KL divergence in the reward of a response; 0: no reference is loaded


def workflow(options: Options, model: Models, compute: ComputeFunction, prompts: Data) -> None:
    """Describes one iteration."""
    responses, scores, kl, loss = policy_gradient.rollout(options, model, prompts)
    advantages = compute(
        "group_advantages.leave_one_out_advantages",
        responses=responses,
        scores=scores,
        makes={"advantages": "row"},
        scope="group",
        **kl,
    )
    divisor = policy_gradient.divisor(options)
    model("actor").train(
        "surrogates.surrogate_loss", prompts, responses, advantages=advantages, divisor=divisor, entropy=True, **loss
    )


def problem(options: Options, *, samples_per_prompt: int) -> str:
    """Returns why these options make no sense together or with those of the run; empty if they do."""
    if samples_per_prompt < 2:
        return "the baseline is the mean of a prompt's other samples: set samples_per_prompt=4, or at least 2"
    return policy_gradient.loss_problem(options)
