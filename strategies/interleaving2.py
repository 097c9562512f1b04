"""Interleaving, concurrently: the placement of interleaving1, but partners exchange everything at once.

All rows are gathered among partners in one exchange; then the ranks of the reference and those of the reward model
compute all of them at the same time, in batches twice as large, and one exchange returns logprobs and scores. Half as
many exchanges as interleaving1, at the price of waiting for the slowest partner's responses. The asynchronous mode of
APP's Interleaving (arXiv 2312.11819).
"""

from dataclasses import replace

from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement, interleave, read_ratios, split_by_ratio
from rlhf_spmd.plan.workload import Workload


def place(
    workload: Workload,
    cluster: Cluster,
    *,
    ratios: tuple[str, ...] = ("reference=1/2", "reward=1/2"),
    zero: int = 0,
    micro_batch: int | None = None,
) -> Placement:
    """ratios: the share of the ranks that a model gets, all if it is not named; shares below 1 sum to 1.
    zero: ZeRO stage of actor and critic; 3 shards reference and reward, too, each over its own ranks.
    micro_batch: sequences per forward, None takes the workload's."""
    share = split_by_ratio(read_ratios(ratios, workload.workflow.models), cluster.ranks)
    parts = [ranks for ranks in share.values() if ranks != cluster.ranks]
    everyone = interleave(*parts) if parts else cluster.ranks  # partners stand side by side
    layouts = {}
    for model, ranks in share.items():
        stage = zero if workload.workflow.train_call(model) or zero == 3 else 0
        where = everyone if ranks == cluster.ranks else ranks
        layouts[model] = Layout.data_parallel(where, zero=stage, micro_batch=micro_batch)
    placed = Placement.by_model(workload, **layouts)
    return replace(placed, joint=(("reference_infer", "reward_infer"),))
