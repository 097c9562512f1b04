"""A placement: call -> layout. Strategies return one; here are its checks and the helper for placement ratios."""

from collections.abc import Mapping
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
    """The layout of every call of a workflow that has a model."""

    layouts: Mapping[str, Layout]

    @classmethod
    def by_model(cls, workload: Workload, **layouts: Layout) -> "Placement":
        """One layout per model, used by all its calls: `Placement.by_model(workload, actor=..., critic=...)`."""
        models, calls = workload.workflow.models, workload.workflow.placed_calls
        unknown = [model for model in layouts if model not in models]
        if unknown:
            raise UserError(f"{', '.join(unknown)} is no model of this workflow; its models are {', '.join(models)}")
        missing = [model for model in models if model not in layouts]
        if missing:
            homeless = ", ".join(call.name for call in calls if call.model in missing)
            raise UserError(f"no layout for {', '.join(missing)}, so {homeless} cannot run; give by_model one each")
        return cls({call.name: layouts[call.model] for call in calls})

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
            raise UserError(
                f"ratio {ratios[model]} of {model} rounds to no rank of {len(ranks)}; "
                f"give it at least 1/{len(ranks)} or start more ranks"
            )
        split[model] = ranks[first:last]
        if offset == 1:
            offset, group = Fraction(0), []
    if group:
        raise UserError(f"ratios of {', '.join(group)} sum to {offset}, not to 1: some ranks would stay empty")
    return {model: split[model] for model in ratios}


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
    collective = (
        call.kind == "train"
        or (call.kind in ("generate", "infer") and home.zero == 3)
        or (call.kind == "compute" and workload.whiten == "batch")
    )
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
    if not problems and not found:
        for name, text in _zero_problems(placement, workload):
            found.setdefault((placement.layouts[name].ranks, text), []).append(name)
    for (ranks, text), calls in found.items():
        where = f" on ranks {format_ranks(ranks)}" if ranks else ""
        problems.append(f"call{'s' * (len(calls) > 1)} {', '.join(calls)}{where}: {text}")
    if problems:
        raise UserError("; ".join(problems))


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
    """Calls whose ZeRO stage cannot be: it belongs to a model that trains, there where it trains; and stage 3 keeps no
    full copy, so that every other call of that model must gather on exactly the same ranks."""
    problems = []
    for call in workload.workflow.placed_calls:
        layout = placement.layouts[call.name]
        train = workload.workflow.train_call(call.model)
        if train is None:
            if layout.zero:
                problems.append((call.name, f"ZeRO {layout.zero} is for trained models; use zero=0"))
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
