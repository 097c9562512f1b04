"""Flattening: every call of every model on all ranks, one layout for all. Nothing moves between ranks but gradients.

The co-located placement of DeepSpeed-Chat and most other systems; the baseline of APP (arXiv 2312.11819). Each rank
holds all models, so memory is what limits it; `zero` shards what is trained, stage 3 all weights.
"""

from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.workload import Workload


def place(workload: Workload, cluster: Cluster, *, zero: int = 0, micro_batch: int | None = None) -> Placement:
    """zero: ZeRO stage of the models that train; 3 also shards the weights of the others. micro_batch: sequences per
    forward; None: the option micro_batch."""
    workflow = workload.workflow
    trained = Layout.data_parallel(cluster.ranks, zero=zero, micro_batch=micro_batch)
    frozen = Layout.data_parallel(cluster.ranks, zero=3 if zero == 3 else 0, micro_batch=micro_batch)
    layouts = {model: trained if workflow.train_call(model) else frozen for model in workflow.models}
    return Placement.by_model(workload, **layouts)
