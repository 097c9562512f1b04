"""The FLOPs that an iteration needs, whatever its placement: the numerator of model FLOPs utilization (PaLM, arXiv
2204.02311, appendix B). Activations that are computed again and padding don't count."""

from collections.abc import Sequence

from rlhf_spmd.plan.calls import Train
from rlhf_spmd.plan.cost.seconds import head_flops, layer_flops
from rlhf_spmd.plan.workload import ModelShape, Workload


def iteration_flops(workload: Workload, prompts: Sequence[int], responses: Sequence[int]) -> float:
    """Returns the FLOPs of all model calls of an iteration.

    A training step costs three forward passes, with adapters two, as no gradients of their base are computed.

    prompts, responses: tokens of each sequence, and of its response, which alone has logits or values.
    """
    lengths = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    flops = 0.0
    for call in workload.workflow.placed_calls:
        shape = workload.models[call.model]
        if shape is None:  # a function scores
            continue
        passes = 1
        if isinstance(call, Train):
            passes = workload.epochs * (3 if shape.adapters is None else 2)
        flops += passes * _forward_flops(shape, lengths, sum(responses))
    return flops


def _forward_flops(shape: ModelShape, lengths: Sequence[int], num_outputs: int) -> float:
    """Returns the FLOPs of a forward pass; a token attends to half of its sequence on average."""
    num_tokens = sum(lengths)
    context = sum(length**2 for length in lengths) / (2 * max(num_tokens, 1))
    return shape.num_layers * layer_flops(shape, num_tokens, context) + head_flops(shape, num_outputs)
