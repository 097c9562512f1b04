"""Numbers of the random streams, one per purpose of the drawn tokens; kernels/philox.py computes their bits.

The values are like a file format: changing one of them, or anything else that determines which random number draws a
token (kernels/philox.py, kernels/cdf_tree.py), changes the tokens of a run and requires raising RANDOM_LAYOUT.
"""

from rlhf_spmd.plan.calls import Generate, Workflow

RANDOM_LAYOUT = 2  # version of the layout of random numbers, stored in checkpoints (1: no streams, 24 bits)

# 0 to 127: the generate calls of an algorithm's workflow, in order
NUM_ROLLOUTS = 128
EVALUATION = 128  # responses to held-out prompts during a run
SAMPLES = 129  # the responses that a run prints before and after training
OFFLINE = 130  # generation outside a run: the generate verb, tools make-embedded
# 131 to 255: unused


def of_call(workflow: Workflow, call: Generate) -> int:
    """Returns the stream of a generate call."""
    index = workflow.generate_calls.index(call)
    assert index < NUM_ROLLOUTS, f"{call.name} is generate call {index}, but only {NUM_ROLLOUTS} have streams"
    return index
