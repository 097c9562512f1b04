"""A strategy to copy: one paragraph with the idea and its source, one pure place(). Try it without starting a job:

    cp strategies/_template.py mine.py
    python -m rlhf_spmd check ./mine.py --layout 1x4
    mpirun -n 4 python -m rlhf_spmd train --strategy ./mine.py strategy.ratio=1/4

This one gives the first model that only infers (under PPO the reference) a share of the ranks and the second one (the
reward model) the rest: model placement ratios of APP, arXiv 2312.11819. The models that train use all ranks.
"""

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement, parse_ratio, split_by_ratio
from rlhf_spmd.plan.workload import Workload


def place(workload: Workload, cluster: Cluster, *, ratio: str = "1/2", zero: int = 0) -> Placement:
    """Places the first of the two models that only infer on a share of the ranks.

    ratio: share of the ranks for this model.
    zero: ZeRO stage of the models that train.
    """
    workflow = workload.workflow
    if len(workflow.frozen_models) != 2:
        models = ", ".join(workflow.frozen_models) or "none"
        raise UserError(
            f"this strategy places two models that only infer, and the workflow has {models}; change place()"
        )
    first, second = workflow.frozen_models
    part = parse_ratio(first, ratio)
    share = split_by_ratio({first: part, second: 1 - part}, cluster.ranks)
    everyone = Layout.data_parallel(cluster.ranks, zero=zero)
    frozen = {model: Layout.data_parallel(ranks) for model, ranks in share.items()}
    return Placement.by_model(workload, **dict.fromkeys(workflow.trained_models, everyone), **frozen)
