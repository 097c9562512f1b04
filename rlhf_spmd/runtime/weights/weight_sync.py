"""Copies a model's new weights from where it trains: to its other copies, and to one rank at the end of a run.

Of a model with adapters these are what moves: every copy has the base from the start.
"""

import torch
from torch import Tensor

from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.calls import Train
from rlhf_spmd.plan.program.instructions import BUCKET_BYTES, Transfer
from rlhf_spmd.plan.program.reallocate import plan_reallocation
from rlhf_spmd.plan.program.tensors import trained_weights_of
from rlhf_spmd.plan.program.transfers import holding
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.runtime.weights.rank_models import RankModels
from rlhf_spmd.runtime.weights.weight_mover import Mover


def mover_of(transfer: Transfer, models: RankModels, *, tag_base: int) -> Mover:
    """Returns this rank's part of a transfer of new weights."""
    plan, name, rank = transfer.reallocation, transfer.model, models.world.rank
    assert plan is not None and name is not None, "the transfer moves weights"
    engine = models.engines.get(name)
    return Mover(
        plan,
        rank,
        engine.held() if engine is not None else None,
        [_trained(models.copies[name, plan.targets[index][1]]) for index in plan.targets_of(rank)],
        bucket_bytes=BUCKET_BYTES,
        tag_base=tag_base,
        device=models.world.device,
        arena=models.arena,
    )


def _trained(model: Transformer) -> dict[str, Tensor]:
    """Returns what training changes in a copy."""
    names = model.trained_names()
    return {name: one for name, one in model.state_dict().items() if name in names}


def whole_state(models: RankModels, train: Train) -> dict[str, Tensor] | None:
    """Gathers all that trains of a model, its weights or its adapters, by parameter name, on the CPU of the first rank
    that trains it; None on the others. Collective over these ranks; takes two buckets of extra memory."""
    layout, rank, workload = models.program.placement.layouts[train.name], models.world.rank, models.program.workload
    shape, writer = workload.shape(train.model), layout.ranks[0]
    engine = models.engines[train.model]
    held = engine.held()
    dtype = next(iter(held.values())).dtype
    plan = plan_reallocation(
        shape,
        {rank: holding(layout, rank) for rank in layout.ranks},
        [(writer, Shard())],
        bytes_per_number=dtype.itemsize,
        node_of=models.program.cluster.node_of,
    )
    target = {
        name: torch.empty((weight.rows, weight.columns)[: weight.num_dims], dtype=dtype)
        for weight in (trained_weights_of(shape) if rank == writer else ())
        for _, name in weight.parameters(weight.whole[0])
    }
    mover = Mover(
        plan,
        rank,
        held,
        [target] if rank == writer else [],
        bucket_bytes=BUCKET_BYTES,
        tag_base=0,
        device=models.world.device,
    )
    mover.start()
    mover.finish()
    return target or None
