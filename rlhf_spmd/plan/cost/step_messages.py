"""The collectives of an optimizer step, as the train engines send them (runtime/engines/).

The own engine sums gradients once a step (under stage 2 also for every micro-batch): a rank gets its part of them from
all replicas, between nodes from those on its node first, then sums it over the slices and stages that share weights.
DeepSpeed's stage 3 scatters the sums of every micro-batch. It gathers the weights for every forward, and again for the
backward pass, but for the last REUSE_NUMEL / 2 numbers of the model, which it keeps in between. (Measured with 0.19.8,
tests/mpi/test_step_messages.py.)
"""

from collections.abc import Callable
from dataclasses import dataclass

from rlhf_spmd.plan.cost.memory import num_params, num_trained
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.program.tensors import numbers_in, trained_weights_of
from rlhf_spmd.plan.workload import Workload

# how often all of the bytes are passed on
RINGS = {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "all-reduce": 2}
GRADIENT_BYTES, SQUARES_BYTES = 4, 8  # sums are in float32, those of squares for the norm in float64
REUSE_NUMEL = 10**9  # weights that are used again after so many numbers stay gathered (DeepSpeed's default)
TIED = "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Collective:
    """A message of a step among some ranks.

    num_bytes: of the whole.
    number: how many of these a step sends.
    """

    kind: str  # of RINGS
    ranks: tuple[int, ...]
    num_bytes: int
    number: int = 1


def step_messages(
    workload: Workload, model: str, layout: Layout, rank: int, num_passes: int, node_of: Callable[[int], int]
) -> list[Collective]:
    """Returns the messages of a rank in an optimizer step of a model, without those of passes over slices and stages.

    num_passes: micro-batches of the rank that has the most; the others add blank ones.
    node_of: the node of a rank.
    """
    shape, shard, data = workload.shape(model), layout.shard(rank), layout.data_ranks(rank)
    zero = 0 if layout.dp == 1 else layout.zero if shape.adapters is None else min(layout.zero, 1)
    numbers, parts = num_trained(shape, shard), 1 if zero == 3 else layout.dp
    sums = num_passes if zero == 3 or (zero == 2 and workload.sums_each_pass) else 1
    boxes = [(weight, numbers_in(box)) for weight in trained_weights_of(shape) if (box := weight.box(shard))]
    whole = sum(size for weight, size in boxes if weight.cut is None)
    partial = workload.param_bytes if zero == 3 else GRADIENT_BYTES
    kind, (inside, between) = "reduce-scatter" if zero == 3 else "all-to-all", layout.sum_ranks(rank, node_of)
    sent = [
        Collective(kind, inside, GRADIENT_BYTES * numbers, sums),
        Collective(kind, between, GRADIENT_BYTES * numbers // len(inside), sums),
        Collective("all-reduce", layout.tensor_ranks(rank), partial * whole // parts, num_passes if zero == 3 else 1),
        Collective("all-reduce", layout.model_ranks(rank), SQUARES_BYTES),
    ]
    sent += [
        Collective("all-reduce", layout.tied_ranks(rank), GRADIENT_BYTES * size // parts)
        for weight, size in boxes
        if weight.name == TIED and weight.stages == "ends"
    ]
    if zero in (1, 2):
        sent.append(Collective("all-gather", data, workload.trained_number_bytes(model) * numbers))
    if zero == 0:
        sent.append(Collective("all-gather", data, GRADIENT_BYTES * numbers))
    sent.append(Collective("all-reduce" if zero == 3 else "all-gather", data, SQUARES_BYTES * parts))
    if zero == 3:
        params = num_params(shape, shard)
        again = max(0, params - REUSE_NUMEL // 2)
        sent += [Collective("all-gather", data, workload.param_bytes * size, num_passes) for size in (params, again)]
    return [one for one in sent if len(one.ranks) > 1 and one.num_bytes]
