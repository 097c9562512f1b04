"""The state of DeepSpeed's ZeRO 2 and 3 by parameter: locates each weight in its flat partitions.

DeepSpeed's own checkpoints are pickles. The actual state is plain tensors: the float32 partitions that it updates, and
the state of the inner AdamW for each of them.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from rlhf_spmd.runtime.engines.adamw import MOMENTS, Share

States = Mapping[torch.Tensor, Mapping[str, torch.Tensor]]  # of the inner AdamW, by master


def shares_of_flat(zero: Any, states: States, names: Mapping[int, str], *, rank: int) -> list[Share]:
    """Returns the shares of ZeRO 2: the weights of each group concatenated; each rank has one part.

    zero: DeepSpeed's optimizer.
    names: by id(weight).
    """
    shares, groups = [], (zero.bit16_groups_flat, zero.bit16_groups, zero.single_partition_of_fp32_groups)
    for flat, weights, master in zip(*groups, strict=True):
        first, last = rank * master.numel(), (rank + 1) * master.numel()
        for p in weights:
            begin = (p.data_ptr() - flat.data_ptr()) // flat.element_size()
            start, stop = max(first, begin), min(last, begin + p.numel())
            if start < stop:
                interval = names[id(p)], start - begin, stop - begin
                shares.append(Share(interval, _values(master, states), start - first))
    return shares


def shares_of_parts(zero: Any, states: States, names: Mapping[int, str], *, rank: int) -> list[Share]:
    """Returns the shares of ZeRO 3: each rank has a part of every weight. Arguments as in `shares_of_flat`."""
    shares = []
    for weights, master in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
        offset = 0
        for p in weights:
            size = p.partition_numel()
            start, stop = rank * size, min((rank + 1) * size, p.ds_numel)
            if start < stop:
                shares.append(Share((names[id(p)], start, stop), _values(master, states), offset))
            offset += size
    return shares


def _values(master: torch.Tensor, states: States) -> dict[str, torch.Tensor]:
    return {"master": master} | {kind: states[master][kind] for kind in MOMENTS}


@torch.no_grad()
def publish_flat(zero: Any, *, group: dist.ProcessGroup) -> None:
    """Copies, for ZeRO 2, every rank's masters to the weights, which are views of a flat tensor for each group."""
    groups = zero.parallel_partitioned_bit16_groups, zero.single_partition_of_fp32_groups
    for parts, master in zip(*groups, strict=True):
        dist.all_gather(list(parts), master.detach().to(parts[0].dtype, copy=True), group=group)


def publish_parts(zero: Any) -> None:
    """Copies, for ZeRO 3, masters to the weights in the compute dtype, and gathers small weights everywhere.
    Collective."""
    for number in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(number)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
