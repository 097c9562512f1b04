"""Streams of random numbers: what tokens are drawn for. The numbers of one stream never meet those of another.

The values are part of what a run is, like a file format: whoever changes one, or anything else that says which random
number draws a token (kernels/philox.py, kernels/tree.py), draws other tokens and has to raise RANDOM_LAYOUT.
"""

from rlhf_spmd.plan.workflow import Call, Workflow

RANDOM_LAYOUT = 2  # version of the layout of random numbers; checkpoints carry it (1: without a stream, of 24 bits)

# 0 to 127: the generate calls of an algorithm's workflow, by their place among them
NUM_ROLLOUTS = 128
EVALUATION = 128  # responses to held-out prompts while a run goes on
SAMPLES = 129  # the responses that a run shows before and after training
OFFLINE = 130  # generation outside a run: the generate verb, embedded/make.py
# 131 to 255: free


def of_call(workflow: Workflow, call: Call) -> int:
    """The stream of a generate call."""
    index = workflow.generate_calls.index(call)
    assert index < NUM_ROLLOUTS, f"{call.name} is the generate call {index} of {NUM_ROLLOUTS} that have streams"
    return index
