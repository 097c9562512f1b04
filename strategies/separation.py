"""Separation: training on some ranks; generation and inference, with shadow copies of actor and critic, on the others.

Finished mini-batches stream to the trainers, which start the first PPO epoch on them while generation goes on; new
weights return at the end of the iteration, so nothing is ever stale. Each side may be split as suits it: training into
tp slices and pp stages, generation into tp slices inside a node, with several replicas. Where there are at least four
generation ranks (times tp), actor, critic, reference and reward have ranks of their own there; otherwise they share
them in the order of the calls. They wait while the trainers finish the other epochs. Separation of APP (arXiv
2312.11819).
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
    generation_ranks: int | None = None,
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
    """generation_ranks: number of ranks, counted from the last, that generate and infer; None: half of the ranks.
    ratios: share of these ranks for each model, such as actor=1/2,critic=1/6,reference=1/6,reward=1/6 under PPO; a
    model that is not named gets all of them. generation_tp: tensor-parallel slices of each model on these ranks.
    generation_pp: pipeline stages of each model on these ranks. training_tp: tensor-parallel slices of the models in
    training. training_pp: pipeline stages of the models in training. stream: start training on the first mini-batches
    while others are generated. in_flight: mini-batches that may be in transit at once while streaming.
    decode_mini_batches: mini-batches whose rows a replica decodes at once while streaming. zero: ZeRO stage of the
    models in training. recompute: compute activations again in the backward pass. micro_batch: sequences per forward;
    None: the option micro_batch. tokens: most tokens per forward; replaces micro_batch."""
    size = cluster.num_devices
    num = size // 2 if generation_ranks is None else generation_ranks
    if not 0 < num < size:
        fix = f"set strategy.generation_ranks from 1 to {size - 1}" if size > 2 else "set strategy.generation_ranks=1"
        raise UserError(
            f"{num} generation ranks of {size} leave {size - num} to train; there must be at least one of each: "
            + (fix if size > 1 else "start at least 2 ranks")
        )
    training_ranks, others = cluster.ranks[: size - num], cluster.ranks[size - num :]
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
