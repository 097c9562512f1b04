"""The state of DeepSpeed's ZeRO 2 and 3 by parameter: locates each weight in its flat partitions.

DeepSpeed's own checkpoints are pickles. The actual state is plain tensors: the float32 partitions that it updates, and
the state of the inner AdamW for each of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.runtime.engines.flat_engine import Interval, ReadState

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Share:
    """An interval of a weight, stored in a flat master at `offset`."""

    interval: Interval
    master: Tensor
    offset: int

    @property
    def part(self) -> slice:
        _, start, stop = self.interval
        return slice(self.offset, self.offset + stop - start)


def shares_of_flat(zero: Any, names: Mapping[int, str], *, rank: int) -> list[Share]:
    """ZeRO 2: all weights concatenated; each rank has one part. zero: DeepSpeed's optimizer; names: by id(weight)."""
    (flat,), (weights,), (master,) = zero.bit16_groups_flat, zero.bit16_groups, zero.single_partition_of_fp32_groups
    shares, first, last = [], rank * master.numel(), (rank + 1) * master.numel()
    for p in weights:
        begin = (p.data_ptr() - flat.data_ptr()) // flat.element_size()
        start, stop = max(first, begin), min(last, begin + p.numel())
        if start < stop:
            shares.append(Share((names[id(p)], start - begin, stop - begin), master, start - first))
    return shares


def shares_of_parts(zero: Any, names: Mapping[int, str], *, rank: int) -> list[Share]:
    """ZeRO 3: each rank has a part of every weight. Arguments as above."""
    shares = []
    for weights, master in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
        offset = 0
        for p in weights:
            size = p.partition_numel()
            start, stop = rank * size, min((rank + 1) * size, p.ds_numel)
            if start < stop:
                shares.append(Share((names[id(p)], start, stop), master, offset))
            offset += size
    return shares


def state_of(optimizer: torch.optim.Optimizer, shares: Sequence[Share]) -> tuple[int, dict]:
    """See `TrainEngine.optimizer_state`."""
    num_steps, by_interval = 0, {}
    for share in shares:
        state = optimizer.state[share.master]
        values = {"master": share.master} | {kind: state[kind] for kind in MOMENTS}
        by_interval[share.interval] = {kind: value.detach()[share.part] for kind, value in values.items()}
        num_steps = int(state["step"])
    return num_steps, by_interval


@torch.no_grad()
def load_into(optimizer: torch.optim.Optimizer, shares: Sequence[Share], num_steps: int, read: ReadState) -> None:
    """Reads masters and moments of these shares; padding of a partition stays zero."""
    for master in {id(share.master): share.master for share in shares}.values():
        step = torch.tensor(float(num_steps), dtype=torch.float32, device=master.device)
        optimizer.state[master] = {"step": step} | {kind: torch.zeros_like(master) for kind in MOMENTS}
    for share in shares:
        state = optimizer.state[share.master]
        for kind, value in {"master": share.master, **{kind: state[kind] for kind in MOMENTS}}.items():
            value.detach()[share.part] = read(kind, share.interval).to(value.device)


@torch.no_grad()
def publish_flat(zero: Any, *, group: dist.ProcessGroup) -> None:
    """ZeRO 2: copies every rank's masters to the weights, which are views of one flat tensor."""
    (parts,), (master,) = zero.parallel_partitioned_bit16_groups, zero.single_partition_of_fp32_groups
    mine = master.detach().to(parts[0].dtype, copy=True)
    dist.all_gather(list(parts), mine, group=group)


def publish_parts(zero: Any) -> None:
    """ZeRO 3: copies masters to the weights in the compute dtype, and gathers small weights everywhere. Collective."""
    for number in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(number)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
