"""Training of a reward model on pairs of responses (Bradley-Terry). No torch, no ranks.

Ouyang et al. 2022 (arXiv 2203.02155), with the margins of Touvron et al. 2023 (arXiv 2307.09288) from the column
`margin`. The score of a response is the scalar head's output at its last token. The model starts from a language model,
whose head is then zeros, or from a reward model; what it saves is a folder for models.reward. With foresight_coef it is
also a value function, from which a critic of PPO may start. The tensor math is in preferences.py.
"""

from dataclasses import dataclass

from rlhf_spmd.algorithms import page
from rlhf_spmd.algorithms.page import Metric, NonNegative, Number
from rlhf_spmd.plan.workflow import ComputeFunction, Data, Models, Role

TITLE = "reward model"
DATA = {"prompts": "prompt", "chosen": "chosen", "rejected": "rejected", "margins": Number("margin", default=0.0)}
ROLES = {"reward": Role("scalar", lr=1e-5, saved=True)}


@dataclass(frozen=True, slots=True)
class Options(page.Options):
    """Options of the loss of a reward model."""

    # weight of (chosen + rejected score)^2, which keeps scores around 0, e.g. 0.01; 0: none
    centering_coef: NonNegative = 0.0
    # weight of (output at an earlier token - score)^2, for critics, e.g. 0.1; 0: none
    foresight_coef: NonNegative = 0.0


def workflow(
    options: Options,
    model: Models,
    compute: ComputeFunction,
    prompts: Data,
    chosen: Data,
    rejected: Data,
    margins: Data,
) -> None:
    """Describes one iteration."""
    model("reward").train("preferences.bradley_terry_loss", prompts, chosen, rejected, margins=margins, divisor="rows")


METRICS = {
    # mean per pair
    "loss": Metric("reward", "loss", headline="", floor=1.0, advice="lower optimizer.reward_lr", better="less"),
    "accuracy": Metric("reward", "accuracy", "{:8.1%}", headline=""),  # pairs whose chosen response scores higher
    "margin": Metric("reward", "margin", "{:+8.4f}"),  # score of the chosen response - that of the rejected one
    "score_mean": Metric("reward", "score", "{:+8.4f}", leaves=3),  # mean score of all responses
    "score_min": Metric("reward", over="min"),  # smallest score
    "score_max": Metric("reward", over="max"),  # largest score
}
