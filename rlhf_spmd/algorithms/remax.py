"""ReMax: REINFORCE with the score of a greedy response to the same prompt as the baseline. No torch, no ranks.

Li et al. 2023 (arXiv 2310.10505). The two generate calls do not depend on each other, so a strategy may run them side
by side. The tensor math is in group_advantages.py and surrogates.py.
"""

from dataclasses import dataclass

from rlhf_spmd.algorithms import policy_gradient
from rlhf_spmd.algorithms.page import Metric, NonNegative
from rlhf_spmd.plan.workflow import ComputeFunction, Data, Models

TITLE = "ReMax"
DATA = {"prompts": "prompt"}
ROLES = policy_gradient.ROLES


@dataclass(frozen=True, slots=True)
class Options(policy_gradient.Options):
    """Options of ReMax."""

    kl_coef: NonNegative = 0.05  # weight of the KL divergence in the reward of each token; 0: no reference is loaded


def workflow(options: Options, model: Models, compute: ComputeFunction, prompts: Data) -> None:
    """Describes one iteration."""
    responses, scores, kl, loss = policy_gradient.rollout(options, model, prompts)
    greedy_responses, _ = model("actor").generate(prompts, name="greedy", temperature=0.0)
    greedy_scores = model("reward").infer("scores", prompts, greedy_responses, output="greedy_scores")
    advantages = compute(
        "group_advantages.greedy_baseline_advantages",
        responses=responses,
        scores=scores,
        greedy_scores=greedy_scores,
        makes={"advantages": "token"},
        **kl,
    )
    divisor = policy_gradient.divisor(options)
    model("actor").train(
        "surrogates.surrogate_loss", prompts, responses, advantages=advantages, divisor=divisor, entropy=True, **loss
    )


def problem(options: Options) -> str:
    """Returns why these options make no sense together or with those of the run; empty if they do."""
    return policy_gradient.loss_problem(options)


METRICS = {name: metric for name, metric in policy_gradient.METRICS.items() if name != "kl_loss"}
METRICS["greedy_reward"] = Metric("reward")  # mean of the greedy responses
