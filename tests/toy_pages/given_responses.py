"""A page without generation: likelihood of the responses that the data set has."""

from dataclasses import dataclass

from rlhf_spmd.algorithms import page
from rlhf_spmd.algorithms.page import Metric
from rlhf_spmd.plan.workflow import Role

TITLE = "likelihood"
DATA = {"prompts": "prompt", "responses": "answer"}
ROLES = {"student": Role("lm", lr=1e-3, saved=True)}
METRICS = {"nll": Metric("student", "nll", headline="nats per token")}


@dataclass(frozen=True, slots=True)
class Options(page.Options):
    epochs: int = 2
    weight: float = 1.0  # of the loss


def workflow(options, model, compute, prompts, responses):
    model("student").train("negative_likelihood", prompts, responses)


def negative_likelihood(logprobs_BG, mask_BG, *, weight):
    total = -logprobs_BG.where(mask_BG, logprobs_BG.new_zeros(())).sum()
    return weight * total, {"nll": (total.detach().double(), mask_BG.sum())}
