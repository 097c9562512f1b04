"""A page whose divisor is the sum of the rows' weights: the weighted mean over rows of the mean over tokens."""

from dataclasses import dataclass

from rlhf_spmd.algorithms import page
from rlhf_spmd.algorithms.page import Metric, Number
from rlhf_spmd.plan.workflow import Role

TITLE = "weighted likelihood"
DATA = {"prompts": "prompt", "responses": "completion", "weights": Number("weight", default=1.0)}
ROLES = {"actor": Role("lm", lr=1e-3, saved=True)}
METRICS = {"loss": Metric("actor", "loss", headline="")}


@dataclass(frozen=True, slots=True)
class Options(page.Options):
    """None of its own."""


def workflow(options, model, compute, prompts, responses, weights):
    model("actor").train("weighted_loss", prompts, responses, weights=weights, divisor=weights)


def weighted_loss(logprobs_BG, mask_BG, weights_B):
    nll_B = -logprobs_BG.where(mask_BG, logprobs_BG.new_zeros(())).sum(1) / mask_BG.sum(1).clamp(min=1)
    total = (weights_B * nll_B).sum()
    return total, {"loss": (total.detach().double(), weights_B.double().sum())}
