"""Heterogeneous: generation and inference on one type of device, training on the other.

A cluster file (`--cluster FILE`) names the device type of every node. Generation is bound by memory bandwidth and
training by arithmetic, so each kind of device does the work that suits it; otherwise as separation, with
streaming to the trainers and shadows that get the new weights. A layout never crosses device types. APP (arXiv
2312.11819) leaves the ratios on mixed devices open; `ratios` sets them.
"""

from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.workload import Workload
from rlhf_spmd.strategies._separation import Options, separated

OPTIONS = Options  # the further options of place(), those of separation


def place(workload: Workload, cluster: Cluster, *, generation_device: str | None = None, **options: Any) -> Placement:
    """Places training on the ranks of one device type, generation and inference on those of another.

    generation_device: device type of the ranks that generate and infer; None: that of the last node.
    """
    types = cluster.device_types
    if len(types) != 2:
        raise UserError(
            f"heterogeneous wants two device types, and this cluster has {len(types)} ({', '.join(types)}): name them "
            "in a file and pass --cluster FILE, or use separation"
        )
    chosen = types[-1] if generation_device is None else generation_device
    if chosen not in types:
        raise UserError(f"generation_device {chosen!r} is not in this cluster; its types are {', '.join(types)}")
    training = cluster.ranks_of(next(device for device in types if device != chosen))
    placement: Placement = separated(workload, training, cluster.ranks_of(chosen), Options(**options))
    return placement
