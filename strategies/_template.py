"""A strategy to copy: one paragraph with the idea and its source, one pure place(). Try it without starting a job:

    cp strategies/_template.py mine.py
    python -m rlhf_spmd check ./mine.py --layout 1x4
    mpirun -n 4 python -m rlhf_spmd train --strategy ./mine.py strategy.ratio=1/4

This one gives the reference model a share of the ranks and the reward model the rest (model placement ratios of APP,
arXiv 2312.11819), while actor and critic use all of them.
"""

from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement, parse_ratio, split_by_ratio
from rlhf_spmd.plan.workload import Workload


def place(workload: Workload, cluster: Cluster, *, ratio: str = "1/2", zero: int = 0) -> Placement:
    """ratio: share of the ranks that the reference model gets. zero: ZeRO stage of actor and critic."""
    part = parse_ratio("reference", ratio)
    share = split_by_ratio({"reference": part, "reward": 1 - part}, cluster.ranks)
    everyone = Layout.data_parallel(cluster.ranks, zero=zero)
    return Placement.by_model(
        workload,
        actor=everyone,
        critic=everyone,
        reference=Layout.data_parallel(share["reference"]),
        reward=Layout.data_parallel(share["reward"]),
    )
