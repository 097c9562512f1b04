"""A placement: call -> layout. Strategies return one; here are its checks and the helper for placement ratios."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout, format_ranks
from rlhf_spmd.plan.workflow import Call, Workflow
from rlhf_spmd.plan.workload import Workload


@dataclass(frozen=True, slots=True)
class Placement:
    """The layout of every call of a workflow that has a model, and how what moves between layouts overlaps with work.

    own_first: calls that begin with the rows that a rank has, while those that it lacks are on their way.
    joint: sets of calls that exchange together: one transfer brings what all of them read, one takes away what they
        make. They stand side by side in the workflow, and none depends on another one.
    stream: everything before training is done mini-batch by mini-batch, and the first epoch of training on a mini-batch
        starts as soon as it is there. Not where advantages are whitened over the whole batch (see `streams`).
    in_flight: mini-batches that a rank may have sent, or be ready to receive, ahead of their use while streaming.
    """

    layouts: Mapping[str, Layout]
    own_first: tuple[str, ...] = ()
    joint: tuple[tuple[str, ...], ...] = ()
    stream: bool = False
    in_flight: int = 2

    def __post_init__(self) -> None:
        for field, found in (("own_first", self.own_first), ("joint", self.joint), *(("joint", s) for s in self.joint)):
            if isinstance(found, str):
                raise UserError(f"{field} is a set of names, not the text {found!r}; write ({found!r},)")
        object.__setattr__(self, "own_first", tuple(self.own_first))
        object.__setattr__(self, "joint", tuple(tuple(calls) for calls in self.joint))

    @classmethod
    def by_model(cls, workload: Workload, **layouts: Layout) -> "Placement":
        """One layout per model, used by all its calls: `Placement.by_model(workload, actor=..., critic=...)`. For more
        options, `dataclasses.replace` the result."""
        models, calls = workload.workflow.models, workload.workflow.placed_calls
        unknown = [model for model in layouts if model not in models]
        if unknown:
            raise UserError(f"{', '.join(unknown)} is no model of this workflow; its models are {', '.join(models)}")
        missing = [model for model in models if model not in layouts]
        if missing:
            homeless = ", ".join(call.name for call in calls if call.model in missing)
            raise UserError(f"no layout for {', '.join(missing)}, so {homeless} cannot run; give by_model one each")
        return cls({call.name: layouts[call.model] for call in calls})

    @classmethod
    def by_ratios(
        cls, workload: Workload, ranks: tuple[int, ...], ratios: Sequence[str], *, zero: int, micro_batch: int | None
    ) -> "Placement":
        """Each model data-parallel on its share of the ranks (see `read_ratios`), those on all ranks with partners side
        by side (see `interleave`). zero: stage of the models that train; 3 shards the frozen ones, too."""
        share = split_by_ratio(read_ratios(ratios, workload.workflow.models), ranks)
        parts = [where for where in share.values() if where != ranks]
        everyone = interleave(*parts) if parts else ranks
        layouts = {}
        for model, where in share.items():
            stage = zero if workload.workflow.train_call(model) or zero == 3 else 0
            order = everyone if where == ranks else where
            layouts[model] = Layout.data_parallel(order, zero=stage, micro_batch=micro_batch)
        return cls.by_model(workload, **layouts)

    def streams(self, workload: Workload) -> bool:
        """Whether an iteration really streams: whitening over the whole batch needs all rows before any training."""
        return self.stream and workload.whiten != "batch"

    def unit(self, call: str) -> tuple[str, ...]:
        """The calls that exchange together with a call, itself included."""
        return next((calls for calls in self.joint if call in calls), (call,))

    def sites(self, call: Call, workflow: Workflow) -> tuple[str, ...]:
        """The placed calls in whose layouts a call runs: itself; or for a `compute`, of the calls that read its
        results, the first one on every distinct list of ranks."""
        if call.kind != "compute":
            return (call.name,)
        found: dict[tuple[int, ...], str] = {}
        for reader in workflow.consumers(call.outputs):
            for site in self.sites(reader, workflow):
                found.setdefault(self.layouts[site].ranks, site)
        return tuple(found.values())


def split_by_ratio(ratios: Mapping[str, float | str | Fraction], ranks: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Gives each model the share of the ranks that it occupies (APP's Model Placement Ratio, arXiv 2312.11819).

    Models with share 1 get all ranks. The others, in the order given, are gathered into groups whose shares sum to 1,
    and each group splits the ranks contiguously by *cumulative* offsets, so that unequal shares neither overlap nor
    leave holes. Shares may be written "1/3". Raises UserError if shares do not add up or one rounds to no rank.
    """
    shares = {model: parse_ratio(model, ratio) for model, ratio in ratios.items()}
    split = {model: ranks for model, share in shares.items() if share == 1}
    offset, group = Fraction(0), []
    for model, share in shares.items():
        if share == 1:
            continue
        start, offset = offset, offset + share
        group.append(model)
        if offset > 1:
            raise UserError(
                f"ratios of {', '.join(group)} sum to {offset}, more than 1; make a group's shares sum to 1"
            )
        first, last = (floor(edge * len(ranks) + Fraction(1, 2)) for edge in (start, offset))
        if first == last:
            least = f"at least 1/{len(ranks)}" if len(ranks) > 1 else "1"
            raise UserError(
                f"ratio {ratios[model]} of {model} rounds to no rank of {len(ranks)}; "
                f"give it {least} or start more ranks"
            )
        split[model] = ranks[first:last]
        if offset == 1:
            offset, group = Fraction(0), []
    if group:
        raise UserError(f"ratios of {', '.join(group)} sum to {offset}, not to 1: some ranks would stay empty")
    return {model: split[model] for model in ratios}


def read_ratios(ratios: Sequence[str], models: tuple[str, ...]) -> dict[str, str]:
    """`("reference=1/4", "reward=3/4")` as shares by model; models that are not named get 1, all ranks."""
    shares, named = dict.fromkeys(models, "1"), set()
    for text in ratios:
        model, equals, share = text.partition("=")
        if not equals or model not in models:
            raise UserError(f"ratio {text!r}: write MODEL=SHARE, e.g. reward=1/2; the models are {', '.join(models)}")
        if model in named:
            raise UserError(f"ratio {text!r}: {model} has two shares; give it one")
        named.add(model)
        shares[model] = share
    return shares


def interleave(*groups: tuple[int, ...]) -> tuple[int, ...]:
    """All ranks of the groups in such an order that each group is spread evenly: (0, 1) and (2, 3) give 0, 2, 1, 3.

    A layout of all ranks in this order and the layouts of the groups share their rows: each rank of a group owns there
    its own rows and those of its neighbours, its *partners*, so that it can begin with its own. Between unequal groups
    they share as many as columns in equal numbers allow.
    """
    places = [(Fraction(2 * index + 1, 2 * len(group)), rank) for group in groups for index, rank in enumerate(group)]
    return tuple(rank for _, rank in sorted(places))


def parse_ratio(model: str, ratio: float | str | Fraction) -> Fraction:
    """The share of the ranks that `ratio` means, e.g. 0.5 or "1/3". Raises UserError if it is no number in (0, 1]."""
    try:
        share = Fraction(ratio)
    except (ValueError, ArithmeticError, TypeError) as error:  # ArithmeticError: 1/0, infinity
        raise UserError(f"ratio {ratio!r} of {model} is not a number; write 0.5 or 1/2") from error
    if not 0 < share <= 1:
        raise UserError(f"ratio {ratio} of {model} is not in (0, 1]; write 0.5 or 1/2, or 1 for all ranks")
    near = share.limit_denominator(1_000_000)  # 0.3333333333333333 means 1/3
    return near if abs(near - share) < 1e-9 else share


def group_of(call: Call, layout: Layout, workload: Workload, placement: Placement) -> str | None:
    """The group whose collectives a call enters where it runs in `layout`; None if it computes alone."""
    train = workload.workflow.train_call(call.model) if call.model else None
    home = placement.layouts[train.name] if train else layout
    gathers = home.zero == 3 and call.kind in ("generate", "infer") and workload.models[call.model] is not None
    collective = call.kind == "train" or gathers or (call.kind == "compute" and workload.whiten == "batch")
    return layout.group if collective and len(layout.ranks) > 1 else None


def validate(placement: Placement, workload: Workload, cluster: Cluster) -> None:
    """Raises one UserError that lists everything wrong with a placement: calls, ranks and mend."""
    workflow = workload.workflow
    problems = []
    for name in placement.layouts:
        if name not in {call.name for call in workflow.placed_calls}:
            calls = ", ".join(call.name for call in workflow.placed_calls)
            problems.append(f"{name} is not a call of this workflow; its calls are {calls}")
    found: dict[tuple[tuple[int, ...], str], list[str]] = {}  # ranks, what is wrong there -> calls
    for call in workflow.placed_calls:
        layout = placement.layouts.get(call.name)
        if layout is None:
            problems.append(f"call {call.name} has no layout; add it to the placement")
        elif not isinstance(layout, Layout):
            problems.append(f"call {call.name}: {layout!r} is not a Layout; use Layout.data_parallel(ranks)")
        else:
            for text in _layout_problems(layout, cluster.num_devices):
                found.setdefault((layout.ranks, text), []).append(call.name)
    problems += _overlap_problems(placement, workflow)
    if not problems and not found:
        problems += _stream_problems(placement, workload)
        for name, text in _zero_problems(placement, workload):
            found.setdefault((placement.layouts[name].ranks, text), []).append(name)
    for (ranks, text), calls in found.items():
        where = f" on ranks {format_ranks(ranks)}" if ranks else ""
        problems.append(f"call{'s' * (len(calls) > 1)} {', '.join(calls)}{where}: {text}")
    if problems:
        raise UserError("; ".join(problems))


def _overlap_problems(placement: Placement, workflow: Workflow) -> list[str]:
    """What is wrong with own_first, joint and in_flight."""
    known = {call.name for call in workflow.placed_calls if call.kind != "train"}
    problems = []
    for field, names in (("own_first", placement.own_first), ("joint", tuple(n for s in placement.joint for n in s))):
        problems += [f"{field} names {name}, which is no call before training" for name in names if name not in known]
        if len(set(names)) != len(names):
            problems.append(f"{field} names a call twice: {', '.join(names)}")
    order = [call.name for call in workflow.calls]
    for calls in placement.joint:
        places = sorted(order.index(name) for name in calls if name in order)
        between = [name for name in order[places[0] : places[-1]] if name not in calls] if places else []
        if between:
            problems.append(f"joint: {', '.join(between)} stands between {' and '.join(calls)}; join neighbours only")
        made = {key for call in workflow.calls if call.name in calls for key in call.outputs}
        for call in workflow.calls:
            if call.name in calls and made & set(call.inputs):
                problems.append(f"joint: {call.name} reads what {' and '.join(calls)} make; take it out of the set")
    if placement.in_flight < 1:
        problems.append(f"in_flight {placement.in_flight} is less than 1; raise it")
    return problems


def _stream_problems(placement: Placement, workload: Workload) -> list[str]:
    """While streaming, a model that trains changes before the last mini-batch is generated and scored."""
    problems = []
    for call in workload.workflow.placed_calls if placement.streams(workload) else ():
        train = workload.workflow.train_call(call.model)
        if train is None or call.kind == "train":
            continue
        shared = set(placement.layouts[call.name].ranks) & set(placement.layouts[train.name].ranks)
        if shared:
            where = f"ranks {format_ranks(tuple(sorted(shared)))}, where {train.name} changes the weights meanwhile"
            problems.append(f"stream: {call.name} is on {where}; place it elsewhere, or drop stream")
    return problems


def _layout_problems(layout: Layout, size: int) -> list[str]:
    """What is wrong with a layout in a world of `size` ranks."""
    found = layout.problems()
    outside = [rank for rank in layout.ranks if not 0 <= rank < size]
    if outside:
        world = f"{size} ranks (0-{size - 1})" if size > 1 else "1 rank (0)"
        more = f"use ranks below {size} or start at least {max(outside) + 1} ranks"
        mend = more if min(outside) >= 0 else "ranks are counted from 0"
        found.append(f"rank {outside[0]} is outside the world of {world}; {mend}")
    if (layout.pp, layout.tp) != (1, 1):
        found.append(f"pp {layout.pp}, tp {layout.tp}: only data parallelism runs so far; set pp = tp = 1")
    return found


def _zero_problems(placement: Placement, workload: Workload) -> list[tuple[str, str]]:
    """Calls whose ZeRO stage cannot be: it belongs to a model that trains, there where it trains, or is stage 3 of a
    frozen one; and stage 3 keeps no full copy, so that all calls of that model must gather on the same ranks."""
    problems = []
    for call in workload.workflow.placed_calls:
        layout = placement.layouts[call.name]
        train = workload.workflow.train_call(call.model)
        if train is None:
            first = next(c for c in workload.workflow.placed_calls if c.model == call.model)
            there = placement.layouts[first.name]
            if layout.zero not in (0, 3):
                text = f"ZeRO {layout.zero} shards gradients or optimizer state, and {call.model} has none; use 0 or 3"
                problems.append((call.name, text))
            elif (layout.ranks, layout.zero) != (there.ranks, there.zero) and 3 in (layout.zero, there.zero):
                text = f"{first.name} has {call.model} on ranks {format_ranks(there.ranks)} with ZeRO {there.zero}"
                problems.append((call.name, f"{text}; use the same ranks and stage for both, or ZeRO 0"))
            continue
        home = placement.layouts[train.name]
        if home.zero == 3 and layout.ranks != home.ranks:
            text = f"{train.name} shards the weights over ranks {format_ranks(home.ranks)} by ZeRO 3"
            problems.append((call.name, f"{text}; use the same ranks, or ZeRO 0-2 for {train.name}"))
        elif layout.zero and (layout.ranks, layout.zero) != (home.ranks, home.zero):
            there = f"ranks {format_ranks(home.ranks)} with ZeRO {home.zero}"
            text = f"ZeRO {layout.zero} would be ignored, because {call.model} trains on {there}"
            problems.append((call.name, f"{text}; use zero=0 here, and set the stage of {train.name}"))
    return problems
