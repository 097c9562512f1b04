"""Interleaving, concurrently: the placement of interleaving1, but partners exchange everything at once.

All rows are gathered among partners in one exchange; then the ranks of the reference and those of the reward model
compute all of them at the same time, in batches twice as large, and one exchange returns logprobs and scores. Half as
many exchanges as interleaving1, at the price of waiting for the slowest partner's responses. The asynchronous mode of
APP's Interleaving (arXiv 2312.11819).
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
    return replace(placed, joint=(("reference_infer", "reward_infer"),))
