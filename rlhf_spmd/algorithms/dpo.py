"""Direct preference optimization and its relatives: a policy learns from pairs of responses. No torch, no ranks.

Rafailov et al. 2023 (arXiv 2305.18290). Options make it one of VARIANTS. SimPO and ORPO have no reference; that of the
others is the actor at the start, unless models.reference is given. The tensor math is in preferences.py.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, PositiveFloat

from rlhf_spmd.algorithms import page
from rlhf_spmd.algorithms.page import Loss, Metric, NonNegative, Variant
from rlhf_spmd.plan.workflow import ComputeFunction, Data, Models, Role

TITLE = "DPO"
DATA = {"prompts": "prompt", "chosen": "chosen", "rejected": "rejected"}
ROLES = {"actor": Role("lm", lr=1e-6, saved=True), "reference": Role("lm", starts_from=("actor",))}
VARIANTS = (
    Variant("DPO", "", "-log sigmoid(beta d)", "2305.18290"),
    Variant("cDPO", "label_smoothing=0.1", "0.9 of that + 0.1 of the loss with the pair swapped", "Mitchell 2023"),
    Variant(
        "robust DPO",
        "loss=robust label_smoothing=0.1",
        "(-0.9 log sigmoid(beta d) + 0.1 log sigmoid(-beta d)) / 0.8",
        "2403.00409",
    ),
    Variant("IPO", "loss=ipo", "(d - 1 / (2 beta))^2; in TRL with `per_token=true`", "2310.12036"),
    Variant("length-normalised", "per_token=true", "log-ratios divided by the tokens of their response", "2405.14734"),
    Variant("hinge", "loss=hinge", "max(0, 1 - beta d)", "2305.10425"),
    Variant("APO-zero", "loss=apo_zero", "1 - sigmoid(beta c) + sigmoid(beta r)", "2408.06266"),
    Variant("APO-down", "loss=apo_down", "sigmoid(beta c) + 1 - sigmoid(beta d)", "2408.06266"),
    Variant("RPO", "nll_coef=1", "the loss, and -log pi(chosen) / its tokens", "2404.19733"),
    Variant(
        "SimPO",
        "loss=simpo beta=2 target_margin=1",
        "-log sigmoid(beta d - target_margin), d of mean logprobs",
        "2405.14734",
    ),
    Variant(
        "ORPO",
        "loss=orpo nll_coef=1",
        "-beta log sigmoid(difference of the log-odds of the means), and -log pi(chosen) / its tokens",
        "2403.07691",
    ),
)
ALONE = ("simpo", "orpo")  # losses without a reference
BelowHalf = Annotated[float, Field(ge=0, lt=0.5)]


@dataclass(frozen=True, slots=True)
class Options(page.Options):
    """Options of the loss. Log-ratios are those of the actor to the reference."""

    beta: PositiveFloat = 0.1  # strength of the pull towards the reference model; of simpo and orpo the loss's scale
    # loss of a pair: DPO's sigmoid; ipo, the squared distance of its log-ratios from 1 / (2 beta); hinge; robust, DPO's
    # without the bias of wrong labels; apo_zero and apo_down, which push the chosen response up or down; simpo and
    # orpo, without a reference
    loss: Loss = "sigmoid"
    # assumed fraction of pairs that are the wrong way round, for loss=sigmoid and loss=robust; 0: none
    label_smoothing: BelowHalf = 0.0
    nll_coef: NonNegative = 0.0  # weight of the chosen response's negative log-likelihood, its mean per token; 0: none
    # by how much loss=simpo wants the reward of the chosen response to be larger; 0: larger at all
    target_margin: NonNegative = 0.0
    per_token: bool = False  # average log-ratios over the tokens of a response; false: sum them


def workflow(
    options: Options, model: Models, compute: ComputeFunction, prompts: Data, chosen: Data, rejected: Data
) -> None:
    """Describes one iteration."""
    reference: dict[str, Any] = {}
    if options.loss not in ALONE:
        for name, key in (("ref_chosen_logprobs", chosen), ("ref_rejected_logprobs", rejected)):
            reference[name] = model("reference").infer("logprobs", prompts, key, output=name)
    model("actor").train(
        "preferences.direct_preference_loss",
        prompts,
        chosen,
        rejected,
        divisor="rows",
        **reference,
    )


def problem(options: Options) -> str:
    """Returns why these options make no sense together; empty if they do."""
    if options.label_smoothing and options.loss not in ("sigmoid", "robust"):
        return f"label_smoothing belongs to loss=sigmoid or robust, not to loss={options.loss}; leave one of them out"
    if options.loss == "robust" and not options.label_smoothing:
        return "loss=robust needs label_smoothing, the fraction of pairs that are the wrong way round, e.g. 0.1"
    if options.loss == "orpo" and not options.nll_coef:
        return "loss=orpo is a term beside the likelihood of the chosen response: set nll_coef=1"
    if options.target_margin and options.loss != "simpo":
        return f"target_margin belongs to loss=simpo, not to loss={options.loss}; leave one of them out"
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
