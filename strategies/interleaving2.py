"""Interleaving, concurrently: the placement of interleaving1, but partners exchange everything at once.

All rows are gathered among partners in one exchange; then the ranks of each model that only infers (under PPO the
reference and the reward model) compute all of them at the same time, in larger batches, and one exchange returns the
results. Half as many exchanges as interleaving1, at the price of waiting for the slowest partner's responses. The
asynchronous mode of APP's Interleaving (arXiv 2312.11819).
"""

from dataclasses import replace
from itertools import groupby

from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Limits
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.workload import Workload


def place(
    workload: Workload,
    cluster: Cluster,
    *,
    ratios: tuple[str, ...] = (),
    zero: int = 0,
    micro_batch: int | None = None,
    tokens: int | None = None,
) -> Placement:
    """Places the models as interleaving1 does, with one exchange for those that only infer.

    ratios: share of the ranks for each model, such as reference=1/4,reward=3/4 under PPO; other models get all ranks,
        and the shares below 1 sum to 1; empty: the models that are not trained share the ranks evenly.
    zero: ZeRO stage of the models that train; 3 also shards the weights of the others, each over its own ranks.
    micro_batch: number of sequences per forward pass; None: the option micro_batch.
    tokens: limit on the tokens of a forward pass, in place of micro_batch; None: no limit.
    """
    limits: Limits = {"micro_batch": micro_batch, "tokens": tokens}
    placed = Placement.by_ratios(workload, cluster.ranks, ratios, zero=zero, **limits)
    frozen = workload.workflow.frozen_calls
    runs = groupby(workload.workflow.calls, key=lambda call: call in frozen)  # calls of a joint set are neighbours
    sets = [tuple(call.name for call in run) for is_frozen, run in runs if is_frozen]
    return replace(placed, joint=tuple(names for names in sets if len(names) > 1))
