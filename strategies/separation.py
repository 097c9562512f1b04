"""Separation: training on some ranks; generation and inference, with shadow copies of actor and critic, on the others.

Finished mini-batches stream to the trainers, which start the first PPO epoch on them while generation goes on; new
weights return at the end of the iteration, so nothing is ever stale. Where there are at least four generation ranks,
actor, critic, reference and reward have ranks of their own there; otherwise they share them in the order of the calls.
They wait while the trainers finish the other epochs, which must take less than `deadline_s`. Separation of APP (arXiv
2312.11819).
"""

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement, read_ratios, split_by_ratio
from rlhf_spmd.plan.workload import Workload


def place(
    workload: Workload,
    cluster: Cluster,
    *,
    generation_ranks: int | None = None,
    ratios: tuple[str, ...] = (),
    in_flight: int = 2,
    zero: int = 0,
    micro_batch: int | None = None,
) -> Placement:
    """generation_ranks: how many of the ranks, the last ones, generate and infer; None: half of them.
    ratios: shares of those, e.g. actor=1/2,critic=1/6,reference=1/6,reward=1/6; a model that is not named gets all of
    them. in_flight: mini-batches on their way at a time. zero: ZeRO stage of the trainers. micro_batch: sequences per
    forward, None takes the workload's."""
    size, models = cluster.num_devices, workload.workflow.models
    num = size // 2 if generation_ranks is None else generation_ranks
    if not 0 < num < size:
        mend = f"set strategy.generation_ranks from 1 to {size - 1}" if size > 2 else "set strategy.generation_ranks=1"
        raise UserError(
            f"{num} generation ranks of {size} leave {size - num} to train; there must be at least one of each: "
            + (mend if size > 1 else "start at least 2 ranks")
        )
    training, rest = cluster.ranks[: size - num], cluster.ranks[size - num :]
    if ratios or num < len(models):
        share = split_by_ratio(read_ratios(ratios, models), rest)
    else:  # generation takes longest: each of the others gets a sixth, at least one rank
        few = max(1, num // 6)
        edges = [0, *(num - few * (len(models) - 1 - index) for index in range(len(models)))]
        share = {model: rest[edges[index] : edges[index + 1]] for index, model in enumerate(models)}
    layouts = {}
    for call in workload.workflow.placed_calls:
        trains = call.kind == "train"
        where = training if trains else share[call.model]
        layouts[call.name] = Layout.data_parallel(where, zero=zero if trains else 0, micro_batch=micro_batch)
    return Placement(layouts, stream=True, in_flight=in_flight)
