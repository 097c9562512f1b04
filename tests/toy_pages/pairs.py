"""A page with pairs: two responses to a prompt, of which the first one is to become more likely than the second."""

from dataclasses import dataclass

from rlhf_spmd.algorithms import page
from rlhf_spmd.algorithms.page import Metric
from rlhf_spmd.plan.workflow import Role

TITLE = "preferences"
DATA = {"prompts": "prompt", "better": "chosen", "worse": "rejected"}
ROLES = {"policy": Role("lm", lr=1e-3), "anchor": Role("lm", starts_from=("policy",))}
METRICS = {"preference_loss": Metric("policy", "loss", headline=""), "agreement": Metric("policy", "agrees")}


@dataclass(frozen=True, slots=True)
class Options(page.Options):
    epochs: int = 2
    beta: float = 0.5


def workflow(options, model, compute, prompts, better, worse):
    policy, anchor = model("policy"), model("anchor")
    anchor_better = anchor.infer("logprobs", prompts, better, output="anchor_better")
    anchor_worse = anchor.infer("logprobs", prompts, worse, output="anchor_worse")
    policy.train(
        "preference_loss",
        prompts,
        better,
        worse,
        divisor="rows",
        anchor_better=anchor_better,
        anchor_worse=anchor_worse,
    )


def preference_loss(
    better_logprobs_BG, worse_logprobs_BG, better_mask_BG, worse_mask_BG, anchor_better_BG, anchor_worse_BG, *, beta
):
    zero = better_logprobs_BG.new_zeros(())
    better_B = (better_logprobs_BG - anchor_better_BG).where(better_mask_BG, zero).sum(1)
    worse_B = (worse_logprobs_BG - anchor_worse_BG).where(worse_mask_BG, zero).sum(1)
    real_B = better_mask_BG.any(1)
    loss_B = -(beta * (better_B - worse_B)).sigmoid().log()
    total = loss_B.where(real_B, zero).sum()
    num = real_B.sum()
    return total, {
        "preference_loss": (total.detach().double(), num),
        "agreement": ((better_B > worse_B + 1e-4)[real_B].sum(), num),  # not by rounding alone
    }
