"""Interleaving with rows of its own first: reference and reward each on their own share of the ranks.

Actor and critic are everywhere. A rank that has the reference (or the reward model) also takes the rows of its
partners: it begins with its own while theirs are on their way, and sends the results back, which are waited for only
where training needs them. Reference and reward take half the memory of flattening. The synchronous pairs of APP's
Interleaving (arXiv 2312.11819).
"""

from dataclasses import replace

from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.workload import Workload


def place(
    workload: Workload,
    cluster: Cluster,
    *,
    ratios: tuple[str, ...] = ("reference=1/2", "reward=1/2"),
    zero: int = 0,
    micro_batch: int | None = None,
) -> Placement:
    """ratios: share of the ranks for each model, such as reference=1/4,reward=3/4; a model that is not named gets all
    ranks, and the shares below 1 sum to 1. zero: ZeRO stage of actor and critic; 3 also shards the weights of reference
    and reward, each over its own ranks. micro_batch: sequences per forward; None: the option micro_batch."""
    placed = Placement.by_ratios(workload, cluster.ranks, ratios, zero=zero, micro_batch=micro_batch)
    return replace(placed, own_first=("reference_infer", "reward_infer"))
