"""Separation: training on some ranks; generation and inference, with shadow copies of actor and critic, on the others.

Finished mini-batches stream to the trainers, which start the first PPO epoch on them while generation goes on; new
weights return at the end of the iteration, so nothing is stale unless `ahead` is 1. Each side may be split as suits it:
training into tp slices and pp stages, generation into tp slices inside a node, with several replicas. Where there are
at least four generation ranks (times tp), actor, critic, reference and reward have ranks of their own there; otherwise
they share them in the order of the calls. They wait while the trainers finish the other epochs. Separation of APP
(arXiv 2312.11819).
"""

from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.workload import Workload
from rlhf_spmd.strategies._separation import Options, separated

OPTIONS = Options  # the further options of place()


def place(workload: Workload, cluster: Cluster, *, generation_ranks: int | None = None, **options: Any) -> Placement:
    """Places training on the first ranks, generation and inference on the last.

    generation_ranks: number of ranks, counted from the last, that generate and infer; None: half of the ranks.
    """
    size = cluster.num_devices
    num = size // 2 if generation_ranks is None else generation_ranks
    if not 0 < num < size:
        fix = f"set strategy.generation_ranks from 1 to {size - 1}" if size > 2 else "set strategy.generation_ranks=1"
        raise UserError(
            f"{num} generation ranks of {size} leave {size - num} to train; there must be at least one of each: "
            + (fix if size > 1 else "start at least 2 ranks")
        )
    training, others = cluster.ranks[: size - num], cluster.ranks[size - num :]
    placement: Placement = separated(workload, training, others, Options(**options))
    return placement
