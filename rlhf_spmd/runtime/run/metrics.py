"""The metrics of a run: those of its algorithm's page, and those that every run has."""

from rlhf_spmd.algorithm import Algorithm
from rlhf_spmd.algorithms.page import Metric
from rlhf_spmd.plan.words import SCORES
from rlhf_spmd.plan.workflow import Workflow

# Sums and means are global: over all ranks.
GENERATION = {
    "response_length": Metric("generation", "length", "{:6.1f}"),  # tokens, mean per response
    "ended_fraction": Metric("generation"),  # of responses, those that were not cut at max_new_tokens
    # largest and mean |logprob when generated - logprob when first trained on|, nats
    "parity_max_abs": Metric("generation"),
    "parity_mean_abs": Metric("generation"),
    "gen_tokens": Metric("generation"),
}
SPEED = {
    "gen_tokens_per_s": Metric("speed", "gen tok/s", "{:9,.0f}"),  # of all ranks together
    "moved_bytes": Metric("speed"),  # between layouts, all ranks together; what `check` forecasts
    "moved_messages": Metric("speed"),
    "generate_s": Metric("speed"),
    "iteration_s": Metric("speed", "seconds", "{:7.2f}"),
}


def metrics_of(algorithm: Algorithm, workflow: Workflow) -> dict[str, Metric]:
    """Name -> metric, in the order of the console's columns."""
    own = algorithm.metrics
    found = {name: metric for name, metric in own.items() if metric.headline is not None} | GENERATION | dict(own)
    for call in workflow.placed_calls:
        if call.function == SCORES and algorithm.roles[call.model].judge:
            name = call.outputs[0].removesuffix("s")  # mean per response, as the judge gave it
            found |= {name: Metric(call.model), f"{name}_std": Metric(call.model)}
    for model in workflow.trained_models:
        advice = f"lower optimizer.{model}_lr, or look at the data"
        found[f"{model}_grad_norm"] = Metric("optimizer", floor=1.0, advice=advice)  # before clipping
        found[f"{model}_lr"] = Metric("optimizer")
    return found | SPEED
