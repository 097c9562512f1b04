"""Reallocation: generation with small tp and large dp, training with larger tp and pp, all on the same ranks.

Generation reads every weight for each token, so it likes many replicas, each as little split as memory allows; training
works on many tokens at once and has optimizer state to spread, so it likes to be split. The actor's weights are
redistributed after training: each rank receives only what it lacks, and going back moves nothing, because the training
copy stays. The frozen models and the critic's values run in a layout of their own. ReaL (arXiv 2406.14088).
"""

from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout, Limits
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.workload import Workload


def place(
    workload: Workload,
    cluster: Cluster,
    *,
    generation_tp: int = 1,
    generation_pp: int = 1,
    training_tp: int | None = None,
    training_pp: int = 1,
    inference_tp: int | None = None,
    inference_pp: int = 1,
    zero: int = 0,
    recompute: bool = False,
    offload: bool = False,
    offload_optimizer: bool = False,
    micro_batch: int | None = None,
    tokens: int | None = None,
) -> Placement:
    """Places every call on all ranks, in a grid of its own for generation, inference and training.

    generation_tp: tensor-parallel size of the actor in generation.
    generation_pp: number of pipeline stages of the actor in generation; stages decode one after another, so use them
        only if the actor does not fit otherwise.
    training_tp: tensor-parallel size of the models in training; None: the largest that a node and the key-value heads
        allow.
    training_pp: number of pipeline stages of the models in training.
    inference_tp: tensor-parallel size of the reference, the reward model and the critic when they infer; None: that of
        training.
    inference_pp: number of pipeline stages of the reference, the reward model and the critic when they infer.
    zero: ZeRO stage of the models in training.
    recompute: compute activations again in the backward pass instead of keeping them.
    offload: keep the reference and the reward model in host memory between their calls.
    offload_optimizer: keep the optimizer's states in host memory, from where each part comes for its update.
    micro_batch: number of sequences per forward pass; None: the option micro_batch.
    tokens: limit on the tokens of a forward pass, instead of micro_batch; None: no limit.
    """
    ranks = cluster.ranks
    limits: Limits = {"micro_batch": micro_batch, "tokens": tokens}
    if training_tp is None:
        training_tp = workload.largest_tp(cluster, pp=training_pp)
    inference_tp = training_tp if inference_tp is None else inference_tp
    training = Layout.grid_of(
        ranks, pp=training_pp, tp=training_tp, zero=zero, recompute=recompute, offload=offload_optimizer, **limits
    )
    generation = Layout.grid_of(ranks, pp=generation_pp, tp=generation_tp)
    inference = Layout.grid_of(ranks, pp=inference_pp, tp=inference_tp, **limits)
    frozen = Layout.grid_of(ranks, pp=inference_pp, tp=inference_tp, offload=offload, **limits)
    alone = Layout.data_parallel(ranks)  # a reward function has no weights to split
    layouts = {}
    for call in workload.workflow.placed_calls:
        if call.kind == "train":
            layouts[call.name] = training
        elif call.kind == "generate":
            layouts[call.name] = generation
        elif workload.models[call.model] is None:
            layouts[call.name] = alone
        else:
            layouts[call.name] = inference if workload.workflow.train_call(call.model) else frozen
    return Placement(layouts)
