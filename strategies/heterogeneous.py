"""Heterogeneous: generation and inference on one type of device, training on the other.

A cluster file (`--cluster FILE`) names the device type of every node. Generation is bound by memory bandwidth and
training by arithmetic, so the two kinds of device can each do what they are better at; else it is separation, with
streaming to the trainers and shadows that get the new weights. A layout never crosses device types. APP (arXiv
2312.11819) leaves the ratios on mixed devices open; `ratios` sets them.
"""

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout, Limits
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.workload import Workload


def place(
    workload: Workload,
    cluster: Cluster,
    *,
    generation_device: str | None = None,
    ratios: tuple[str, ...] = (),
    generation_tp: int = 1,
    generation_pp: int = 1,
    training_tp: int = 1,
    training_pp: int = 1,
    stream: bool = True,
    in_flight: int = 2,
    decode_mini_batches: int = 2,
    zero: int = 0,
    recompute: bool = False,
    micro_batch: int | None = None,
    tokens: int | None = None,
) -> Placement:
    """generation_device: device type that generates and infers; None: that of the last node. The other options are
    those of separation."""
    types = cluster.device_types
    if len(types) != 2:
        raise UserError(
            f"heterogeneous wants two device types, and this cluster has {len(types)} ({', '.join(types)}): name them "
            "in a file and pass --cluster FILE, or use separation"
        )
    chosen = types[-1] if generation_device is None else generation_device
    if chosen not in types:
        raise UserError(f"generation_device {chosen!r} is not in this cluster; its types are {', '.join(types)}")
    training_ranks, others = (
        cluster.ranks_of(next(device for device in types if device != chosen)),
        cluster.ranks_of(chosen),
    )
    limits: Limits = {"micro_batch": micro_batch, "tokens": tokens}
    return Placement.separated(
        workload,
        Layout.grid_of(training_ranks, pp=training_pp, tp=training_tp, zero=zero, recompute=recompute, **limits),
        Layout.grid_of(others, pp=generation_pp, tp=generation_tp, **limits),
        ratios=ratios,
        in_flight=in_flight,
        decode_mini_batches=decode_mini_batches,
        stream=stream,
    )
