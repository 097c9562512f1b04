"""Shared by separation and heterogeneous: their options, and the placement of training on some ranks and of all other
calls on the rest."""

from dataclasses import dataclass, replace

from rlhf_spmd.plan.layout import Layout, Limits
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.workload import Workload


@dataclass(frozen=True, slots=True)
class Options:
    """The options of both strategies."""

    # share of the ranks that generate and infer for each model, e.g. actor=3/4,critic=1/4; other models use all of
    # them; empty: each model has some of them for itself, if there are enough
    ratios: tuple[str, ...] = ()
    generation_tp: int = 1  # tensor-parallel size of each model on the ranks that generate and infer
    generation_pp: int = 1  # number of pipeline stages of each model on the ranks that generate and infer
    training_tp: int = 1  # tensor-parallel size of the models in training
    training_pp: int = 1  # number of pipeline stages of the models in training
    stream: bool = True  # start training on the first mini-batches while others are generated
    in_flight: int = 2  # number of mini-batches that may be in transit at once while streaming
    decode_mini_batches: int = 2  # number of mini-batches whose rows a replica decodes at once while streaming
    # begin an iteration when the actor has trained, while the critic still does; the numbers are the same
    chain: bool = True
    # 1: generate the responses of the next iteration while one trains; 0: generate with the newest weights
    ahead: int = 0
    zero: int = 0  # ZeRO stage of the models in training
    recompute: bool = False  # compute activations again in the backward pass instead of keeping them
    offload_optimizer: bool = False  # keep the optimizer's states in host memory; each part comes for its update
    micro_batch: int | None = None  # number of sequences per forward pass; None: the option micro_batch
    tokens: int | None = None  # limit on the tokens of a forward pass, instead of micro_batch; None: no limit


def separated(
    workload: Workload, training_ranks: tuple[int, ...], other_ranks: tuple[int, ...], options: Options
) -> Placement:
    """Places training on the first ranks, all else on the others."""
    limits: Limits = {"micro_batch": options.micro_batch, "tokens": options.tokens}
    training = Layout.grid_of(training_ranks, pp=options.training_pp, tp=options.training_tp, **limits)
    return Placement.separated(
        workload,
        replace(training, zero=options.zero, recompute=options.recompute, offload=options.offload_optimizer),
        Layout.grid_of(other_ranks, pp=options.generation_pp, tp=options.generation_tp, **limits),
        ratios=options.ratios,
        in_flight=options.in_flight,
        decode_mini_batches=options.decode_mini_batches,
        stream=options.stream,
        chain=options.chain,
        ahead=options.ahead,
    )
