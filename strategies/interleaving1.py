"""Interleaving with rows of its own first: each model that only infers on its own share of the ranks.

Under PPO these are the reference and the reward model; the models that train are everywhere. A rank that holds one of
the frozen models also takes the rows of its partners, the ranks that do not: it begins with its own rows while theirs
are on their way, and sends the results back; ranks wait for results only where training needs them. The frozen models
take half the memory of flattening. The synchronous pairs of APP's Interleaving (arXiv 2312.11819).
"""

from dataclasses import replace

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
    """Places the models that only infer on interleaved shares of the ranks, all else on all ranks.

    ratios: share of the ranks for each model, such as reference=1/4,reward=3/4 under PPO; other models get all ranks,
        and the shares below 1 sum to 1; empty: the models that are not trained share the ranks evenly.
    zero: ZeRO stage of the models that train; 3 also shards the weights of the others, each over its own ranks.
    micro_batch: number of sequences per forward pass; None: the option micro_batch.
    tokens: limit on the tokens of a forward pass, in place of micro_batch; None: no limit.
    """
    limits: Limits = {"micro_batch": micro_batch, "tokens": tokens}
    placed = Placement.by_ratios(workload, cluster.ranks, ratios, zero=zero, **limits)
    own_first = tuple(call.name for call in workload.workflow.frozen_calls)
    return replace(placed, own_first=own_first)
