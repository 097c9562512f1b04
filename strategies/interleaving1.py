"""Interleaving with rows of its own first: reference and reward each on their own share of the ranks.

Actor and critic are everywhere. A rank that has the reference (or the reward model) also takes the rows of its
partners: it begins with its own while theirs are on their way, and sends the results back, which are waited for only
where training needs them. Reference and reward take half the memory of flattening. The synchronous pairs of APP's
Interleaving (arXiv 2312.11819).
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
    return replace(placed, own_first=("reference_infer", "reward_infer"))
