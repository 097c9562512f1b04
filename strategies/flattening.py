"""Flattening: every call of every model on all ranks, one layout for all. Nothing moves between ranks but gradients.

The co-located placement of DeepSpeed-Chat and most other systems; the baseline of APP (arXiv 2312.11819). Each rank
holds all models, so memory limits it; `zero` shards the models that train, stage 3 all weights, which inference
gathers one layer after another and generation as a whole. For a model that a rank cannot hold as a whole, `tp` splits
generation into slices, as DeepSpeed-Chat's hybrid engine does; new weights then move to the slices once in an
iteration.
"""

from dataclasses import replace

from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout, Limits
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.workload import Workload


def place(
    workload: Workload,
    cluster: Cluster,
    *,
    zero: int = 0,
    tp: int = 1,
    recompute: bool = False,
    offload: bool = False,
    offload_optimizer: bool = False,
    micro_batch: int | None = None,
    tokens: int | None = None,
) -> Placement:
    """Places every call on all ranks.

    zero: ZeRO stage of the models that train; 3 also shards the weights of the others.
    tp: tensor-parallel size of models that generate, and of those that do not train; training stays data-parallel.
    recompute: compute activations again in the backward pass instead of keeping them.
    offload: keep models that do not train in host memory between their calls.
    offload_optimizer: keep the optimizer's states in host memory, from where each part comes for its update.
    micro_batch: number of sequences per forward pass; None: the option micro_batch.
    tokens: limit on the tokens of a forward pass, in place of micro_batch; None: no limit.
    """
    limits: Limits = {"micro_batch": micro_batch, "tokens": tokens}
    trained = Layout.data_parallel(cluster.ranks, zero=zero, **limits)
    home = trained if tp == 1 else Layout.grid_of(cluster.ranks, tp=tp, **limits)
    frozen = Layout.grid_of(cluster.ranks, tp=tp, zero=3 if zero == 3 else 0, offload=offload, **limits)
    alone = Layout.data_parallel(cluster.ranks, **limits)  # a reward function has no weights to split
    generating = {call.model for call in workload.workflow.generate_calls}
    layouts = {}
    for call in workload.workflow.placed_calls:
        if call.kind == "train":
            layouts[call.name] = replace(trained, recompute=recompute, offload=offload_optimizer)
        elif workload.models[call.model] is None:
            layouts[call.name] = alone
        elif workload.workflow.train_call(call.model) is None:
            layouts[call.name] = frozen
        else:
            layouts[call.name] = home if call.model in generating else trained
    return Placement(layouts)
