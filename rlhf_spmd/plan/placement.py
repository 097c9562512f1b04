"""A placement maps every call to a layout; strategies return one. Also the helpers for placement ratios."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Unpack

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.calls import Call, Compute, ModelCall, Train, Workflow, trains
from rlhf_spmd.plan.layout import Layout, Limits
from rlhf_spmd.plan.workload import Workload

DECODE_MINI_BATCHES = 2  # the default of Placement.decode_mini_batches


@dataclass(frozen=True, slots=True)
class Placement:
    """The layout of every call that has a model, and how transfers between layouts overlap with work.

    own_first: calls that begin with the rows that their rank has, while the missing rows are in transit.
    joint: sets of calls that exchange together: one transfer brings what all of them read, one takes away what they
        make. They are neighbours in the workflow, and none depends on another.
    stream: calls before training run mini-batch by mini-batch, and the first epoch of training starts on each
        mini-batch as it arrives, unless something needs the whole batch before training (see `streams`).
    in_flight: mini-batches that a rank may have sent ahead, or be ready to receive, while streaming.
    decode_mini_batches: mini-batches whose rows a replica decodes at once while streaming. A step of few rows is hardly
        cheaper than one of many, but the first mini-batch ends later among many.
    chain: an iteration begins on each rank when that rank can, not when all have ended the one before, unless that is
        asked for (see `chains`); models whose new weights others wait for train first (program/chain.py).
    ahead: 1: the next batch is sampled while one trains, with weights that are one iteration old (program/ahead.py).
        Calls before training then run on whole batches. 0: every batch is sampled with the newest weights.
    """

    layouts: Mapping[str, Layout]
    own_first: tuple[str, ...] = ()
    joint: tuple[tuple[str, ...], ...] = ()
    stream: bool = False
    in_flight: int = 2
    decode_mini_batches: int = DECODE_MINI_BATCHES
    chain: bool = False
    ahead: int = 0

    def __post_init__(self) -> None:
        for field, names in (("own_first", self.own_first), ("joint", self.joint), *(("joint", s) for s in self.joint)):
            if isinstance(names, str):
                raise UserError(f"{field} is a set of names, not the text {names!r}; write ({names!r},)")
        object.__setattr__(self, "own_first", tuple(self.own_first))
        object.__setattr__(self, "joint", tuple(tuple(calls) for calls in self.joint))

    @classmethod
    def by_model(cls, workload: Workload, **layouts: Layout) -> "Placement":
        """Places each model in one layout, used by all its calls:
        `Placement.by_model(workload, actor=..., critic=...)`. For more options, `dataclasses.replace` the result."""
        models = workload.workflow.models
        if set(layouts) != set(models):
            given = ", ".join(layouts) or "none"
            raise UserError(f"by_model takes a layout for each model of the workflow, {', '.join(models)}, not {given}")
        return cls({call.name: layouts[call.model] for call in workload.workflow.placed_calls})

    @classmethod
    def by_ratios(
        cls, workload: Workload, ranks: tuple[int, ...], ratios: Sequence[str], *, zero: int, **limits: Unpack[Limits]
    ) -> "Placement":
        """Places each model data-parallel on its share of the ranks. Models on all ranks have them in the order of
        `interleave`. Raises UserError if there is nothing to interleave.

        ratios: see `read_ratios`; empty: the frozen models share the ranks evenly.
        zero: ZeRO stage of the models that train; 3 also shards the frozen ones.
        limits: limits of all layouts.
        """
        frozen = workload.workflow.frozen_models
        if not ratios and (len(frozen) < 2 or not workload.workflow.independent(workload.workflow.frozen_calls)):
            what = ", ".join(frozen) or "none"
            raise UserError(
                f"there is nothing to interleave: that takes at least two models that only infer, each without the "
                f"other's results, and this workflow has {what}; use flattening"
            )
        ratios = ratios or [f"{model}=1/{len(frozen)}" for model in frozen]
        share = split_by_ratio(read_ratios(ratios, workload.workflow.models), ranks)
        parts = [where for where in share.values() if where != ranks]
        everyone = interleave(*parts) if parts else ranks
        layouts = {}
        for model, where in share.items():
            stage = zero if workload.workflow.train_call(model) or zero == 3 else 0
            order = everyone if where == ranks else where
            layouts[model] = Layout.data_parallel(order, zero=stage, **limits)
        return cls.by_model(workload, **layouts)

    @classmethod
    def separated(
        cls,
        workload: Workload,
        training: Layout,
        generation: Layout,
        *,
        ratios: Sequence[str],
        in_flight: int,
        decode_mini_batches: int = DECODE_MINI_BATCHES,
        stream: bool = True,
        chain: bool = False,
        ahead: int = 0,
    ) -> "Placement":
        """Places training in one layout, with inferences that use the weights with which it begins; all other calls on
        the ranks of another layout, in its grid. Raises UserError if the workflow only trains.

        ratios: share of these ranks for each model; without any, each model has ranks of its own where there are enough
            of them, generation the most.
        in_flight, decode_mini_batches, stream, chain, ahead: fields of the placement.
        """
        before = [call for call in workload.workflow.placed_calls if not trains(call, workload.workflow)]
        if not before:
            raise UserError("there is nothing to separate: this workflow only trains; use flattening or reallocation")
        models = tuple(dict.fromkeys(call.model for call in before))
        size, ranks = max(1, generation.tp * generation.pp), generation.ranks
        replicas = [ranks[i : i + size] for i in range(0, len(ranks), size)]
        if ratios or len(replicas) < len(models) or len(replicas[-1]) < size:
            share = split_by_ratio(read_ratios(ratios, models), ranks)
        else:  # generation takes longest: each of the others gets a sixth, at least one replica
            few = max(1, len(replicas) // 6)
            edges = [0, *(len(replicas) - few * number for number in reversed(range(len(models))))]
            share = {model: sum(replicas[edges[i] : edges[i + 1]], ()) for i, model in enumerate(models)}
        layouts = {}
        for call in workload.workflow.placed_calls:
            if trains(call, workload.workflow):
                layouts[call.name] = training if isinstance(call, Train) else training.of_inference
            elif workload.models[call.model] is None:  # a reward function has no weights to split
                limits: Limits = {"micro_batch": generation.micro_batch, "tokens": generation.tokens}
                layouts[call.name] = Layout.data_parallel(share[call.model], **limits)
            else:
                layouts[call.name] = generation.on(share[call.model])
        return cls(layouts, (), (), stream, in_flight, decode_mini_batches, chain, ahead)

    def streams(self, workload: Workload) -> bool:
        """Returns whether an iteration streams: the placement asks for it, no batch is sampled ahead, and no call needs
        the whole batch before the weights change."""
        return self.stream and not self.ahead and not any(map(workload.needs_batch, workload.workflow.calls))

    def chains(self, workload: Workload) -> bool:
        """Returns whether an iteration may begin before all ranks have ended the one before: the placement asks for
        it, no batch is sampled ahead or in rounds, and not every iteration ends with something that needs all ranks."""
        may = self.chain and not self.ahead and workload.may_chain and workload.rounds == 1
        return may and bool(workload.workflow.train_calls)

    def unit(self, call: str) -> tuple[str, ...]:
        """Returns the calls that exchange together with a call, itself included."""
        return next((calls for calls in self.joint if call in calls), (call,))

    def sites(self, call: Call, workflow: Workflow) -> tuple[str, ...]:
        """Returns the placed calls in whose layouts a call runs: itself, or for a `compute` its consumers, the first
        one for each distinct list of ranks. A compute with rounds runs where the last placed call before it does."""
        if not isinstance(call, Compute):
            return (call.name,)
        if call.rounds > 1:
            return (_last_maker(call, workflow),)
        by_ranks: dict[tuple[int, ...], str] = {}
        for consumer in workflow.consumers(call.outputs):
            for site in self.sites(consumer, workflow):
                by_ranks.setdefault(self.layouts[site].ranks, site)
        return tuple(by_ranks.values())


def _last_maker(call: Compute, workflow: Workflow) -> str:
    """Returns the last placed call that makes an input of a compute."""
    return [other.name for other in workflow.placed_calls if set(other.outputs) & set(call.inputs)][-1]


def split_by_ratio(ratios: Mapping[str, float | str | Fraction], ranks: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Gives each model its share of the ranks (APP's Model Placement Ratio, arXiv 2312.11819).

    Models with share 1 get all ranks. The others, in the order given, form groups whose shares sum to 1; each group
    splits the ranks contiguously at cumulative offsets, so that shares neither overlap nor leave holes. Shares may be
    written "1/3". Raises UserError if shares do not sum to 1 or one rounds to no rank.
    """
    shares = {model: parse_ratio(model, ratio) for model, ratio in ratios.items()}
    split = dict.fromkeys(ratios, ranks)
    offset, group = Fraction(0), []
    for model, share in shares.items():
        if share == 1:
            continue
        start, offset = offset, offset + share
        group.append(model)
        first, last = (floor(edge * len(ranks) + Fraction(1, 2)) for edge in (start, offset))
        if first == last:
            raise UserError(
                f"ratio {ratios[model]} of {model} rounds to no rank of {len(ranks)}; give it at least "
                f"1/{len(ranks)}, or start more ranks"
            )
        split[model] = ranks[first:last]
        if offset > 1:
            break
        if offset == 1:
            offset, group = Fraction(0), []
    if group:
        raise UserError(f"ratios of {', '.join(group)} sum to {offset}, not to 1; change one of them")
    return split


def read_ratios(ratios: Sequence[str], models: tuple[str, ...]) -> dict[str, str]:
    """Reads `("reference=1/4", "reward=3/4")` as shares by model; a model that is not named gets 1, all ranks."""
    shares = dict[str, str]()
    for text in ratios:
        model, equals, share = text.partition("=")
        if not equals or model not in models or model in shares:
            example = f"{models[-1]}=1/2; the models are {', '.join(models)}"
            raise UserError(f"ratio {text!r}: write MODEL=SHARE, once for a model, e.g. {example}")
        shares[model] = share
    return dict.fromkeys(models, "1") | shares


def interleave(*groups: tuple[int, ...]) -> tuple[int, ...]:
    """Returns all ranks of the groups in an order that spreads each group evenly: (0, 1) and (2, 3) give 0, 2, 1, 3.

    In a layout of one group, each rank then owns the rows that it owns in the layout of all ranks, and those of its
    neighbours there, its *partners*. So it can begin with its own rows. Unequal groups share as many rows as equal
    numbers of columns per rank allow.
    """
    places = [(Fraction(2 * index + 1, 2 * len(group)), rank) for group in groups for index, rank in enumerate(group)]
    return tuple(rank for _, rank in sorted(places))


def parse_ratio(model: str, ratio: float | str | Fraction) -> Fraction:
    """Reads a ratio such as 0.5 or "1/3" as a fraction. Raises UserError if it is not a number in (0, 1]."""
    share = Fraction(0)
    with suppress(ValueError, ArithmeticError, TypeError):  # ArithmeticError: 1/0, infinity
        share = Fraction(ratio)
    if not 0 < share <= 1:
        raise UserError(f"ratio {ratio!r} of {model} is not a number in (0, 1]; write 0.5 or 1/2, or 1 for all ranks")
    near = share.limit_denominator(1_000_000)  # 0.3333333333333333 means 1/3
    return near if abs(near - share) < 1e-9 else share


def ranks_of(call: Call, layout: Layout) -> tuple[int, ...]:
    """Returns the ranks that run a call in a layout: all, or for a `compute` the last stage, which alone has its
    inputs."""
    return layout.last_stage if isinstance(call, Compute) else layout.ranks


def uses_trained_weights(call: ModelCall, rank: int, workload: Workload, placement: Placement) -> bool:
    """Returns whether a call runs with the weights that its model trains on this rank, rather than with a copy.

    It does if it needs the same shard, split among the same ranks; under ZeRO 3, where all ranks gather together, only
    if that holds for all of them.
    """
    train = workload.workflow.train_call(call.model)
    if train is None:
        return False
    layout, training = placement.layouts[call.name], placement.layouts[train.name]
    if training.zero == 3:
        return layout.same_shards(training)
    same_ranks = rank in training.ranks and layout.model_ranks(rank) == training.model_ranks(rank)
    return same_ranks and layout.shard(rank) == training.shard(rank)


def leaves_device(layout: Layout) -> bool:
    """Returns whether the weights of a frozen model in a layout are not on the device of a rank between calls: then no
    other model can have them in common."""
    return layout.offload or (layout.zero == 3 and layout.dp > 1)


def weights_layout(call: ModelCall, rank: int, workload: Workload, placement: Placement) -> Layout:
    """Returns the layout by whose ZeRO stage a rank keeps the weights that a call runs with: that of training or its
    own."""
    train = workload.workflow.train_call(call.model)
    shared = train is not None and uses_trained_weights(call, rank, workload, placement)
    return placement.layouts[train.name if train and shared else call.name]


def group_of(call: Call, layout: Layout, workload: Workload, placement: Placement, rank: int) -> tuple[int, ...] | None:
    """Returns the ranks whose collectives a call enters where it runs in `layout` on `rank`; None if it computes
    alone."""
    if isinstance(call, Train):
        ranks = layout.ranks
    elif isinstance(call, Compute):
        ranks = layout.last_stage if call.sums else (rank,)
    elif workload.models[call.model] is None:
        ranks = (rank,)
    else:
        gathers = weights_layout(call, rank, workload, placement).zero == 3
        ranks = layout.ranks if gathers else layout.model_ranks(rank)
    return ranks if len(ranks) > 1 else None
