"""Supervised fine-tuning: the model learns responses that the data set has. No torch, no ranks.

A row is a text, a conversation, or a prompt and a completion (runtime/data/row_tokens.py). The loss is the mean of
-logprob over the learned tokens of the global mini-batch: those of the response, or of all turns of the assistant
(data.turns=all). The tensor math is in likelihood.py.
"""

from dataclasses import dataclass

from rlhf_spmd.algorithms import page
from rlhf_spmd.algorithms.page import AssistantTokens, Metric
from rlhf_spmd.plan.workflow import ComputeFunction, Data, Models, Role

TITLE = "supervised fine-tuning"
DATA = {"prompts": "prompt", "responses": "completion", "trained": AssistantTokens()}
ROLES = {"actor": Role("lm", lr=2e-5, saved=True)}


@dataclass(frozen=True, slots=True)
class Options(page.Options):
    """Options of supervised fine-tuning."""

    log_entropy: bool = True  # compute the entropy of the distribution of each learned token, too, for the log


def workflow(
    options: Options, model: Models, compute: ComputeFunction, prompts: Data, responses: Data, trained: Data
) -> None:
    """Describes one iteration."""
    model("actor").train(
        "likelihood.likelihood_loss", prompts, responses, trained=trained, divisor=trained, entropy=options.log_entropy
    )


METRICS = {
    # mean of -logprob per learned token, nats
    "loss": Metric(
        "actor", "loss", headline="nats per token", floor=1.0, advice="lower optimizer.actor_lr", better="less"
    ),
    "token_accuracy": Metric("actor", "accuracy", "{:8.1%}", headline=""),  # learned tokens that were the likeliest
    "entropy": Metric("actor", "entropy", leaves=4),  # mean per learned token, nats
    "trained_tokens": Metric("actor", "tokens", "{:7.1f}", leaves=5),  # that are learned, mean per row
}
