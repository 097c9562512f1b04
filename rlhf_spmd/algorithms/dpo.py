"""Direct preference optimization and its relatives: a policy learns from pairs of responses. No torch, no ranks.

Rafailov et al. 2023 (arXiv 2305.18290). Options make it one of

    cDPO                label_smoothing=0.1                  Mitchell 2023
    IPO                 loss=ipo per_token=true              Azar et al. 2023, arXiv 2310.12036; per_token as in TRL
    length-normalised   per_token=true                       Meng et al. 2024, arXiv 2405.14734

The reference is the actor at the start, unless models.reference is given. The tensor math is in preferences.py.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from rlhf_spmd.algorithms import page
from rlhf_spmd.algorithms.page import Metric
from rlhf_spmd.plan.workflow import ComputeFunction, Data, Models, Role

TITLE = "DPO"
DATA = {"prompts": "prompt", "chosen": "chosen", "rejected": "rejected"}
ROLES = {"actor": Role("lm", lr=1e-6, saved=True), "reference": Role("lm", starts_from=("actor",))}
BelowHalf = Annotated[float, Field(ge=0, lt=0.5)]


@dataclass(frozen=True, slots=True)
class Options(page.Options):
    """Options of the loss. Log-ratios are those of the actor to the reference."""

    beta: PositiveFloat = 0.1  # strength of the pull towards the reference model
    # loss of a pair: DPO's sigmoid, or ipo, the squared distance of its log-ratios from 1 / (2 beta)
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    # assumed fraction of pairs that are the wrong way round, for loss=sigmoid; 0: none
    label_smoothing: BelowHalf = 0.0
    per_token: bool = False  # average log-ratios over the tokens of a response; false: sum them


def workflow(
    options: Options, model: Models, compute: ComputeFunction, prompts: Data, chosen: Data, rejected: Data
) -> None:
    """Describes one iteration."""
    reference = model("reference")
    ref_chosen = reference.infer("logprobs", prompts, chosen, output="ref_chosen_logprobs")
    ref_rejected = reference.infer("logprobs", prompts, rejected, output="ref_rejected_logprobs")
    model("actor").train(
        "preferences.direct_preference_loss",
        prompts,
        chosen,
        rejected,
        divisor="rows",
        ref_chosen_logprobs=ref_chosen,
        ref_rejected_logprobs=ref_rejected,
    )


def problem(options: Options) -> str:
    """Returns why these options make no sense together; empty if they do."""
    if options.loss == "ipo" and options.label_smoothing:
        return "label_smoothing belongs to loss=sigmoid, and loss=ipo has no use for it; leave one of them out"
    return ""


METRICS = {
    # mean per pair
    "loss": Metric("actor", "loss", headline="", floor=1.0, advice="lower optimizer.actor_lr", better="less"),
    "accuracy": Metric("actor", "accuracy", "{:8.1%}", headline=""),  # pairs whose chosen response has more reward
    "margin": Metric("actor", "margin", "{:+8.4f}"),  # reward of the chosen response - that of the rejected one
    "chosen_reward": Metric("actor", "chosen", "{:+8.4f}", leaves=3),  # beta * log-ratio of the response, mean per pair
    "rejected_reward": Metric("actor", "rejected", "{:+8.4f}", leaves=4),  # the same of the rejected response
    "chosen_logprob": Metric("actor"),  # of the whole response, mean per pair, nats
    "rejected_logprob": Metric("actor"),  # the same of the rejected response
}
