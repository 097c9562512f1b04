"""The last step of the exact search: it chooses all calls of a phase that only infers together, with arrays.

Once all other calls are chosen, these depend only on the free memory and on the weights that they may share. Every
combination that is quick enough is enumerated: call by call, all candidates are joined with all combinations so far,
and combinations that take too long, or need too much memory on the ranks that they share, are dropped.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from operator import ge

import numpy as np

from rlhf_spmd.plan.search.budget import PRODUCTS, Budget
from rlhf_spmd.plan.search.candidates import Candidate, Destination, unbeaten
from rlhf_spmd.plan.search.iteration_model import Assignment, CallModel

MOST_PRODUCTS = 1 << 20  # combinations in one array
Segment = tuple[int, int, float, float]  # first place, last + 1, free bytes, free bytes with the room for gathering

Shared = tuple[tuple[tuple[Destination, int, bool], ...], ...]  # of each model, of each call: where, ZeRO, offloaded


@dataclass(slots=True)
class Left:
    """The resources that a choice for all other calls leaves to these.

    shared: where the weights are that they may share.
    free_bytes, gathered_bytes, activation_bytes: free at each place, and set aside there for gathered weights and for
        activations, which may take the room of KV caches.
    training_bytes: free where ranks only train, one iteration ahead, for weights in transit; else inf.
    least_s: a lower bound of the seconds of these calls, once known.
    """

    shared: Shared
    free_bytes: list[float]
    gathered_bytes: list[float]
    activation_bytes: list[float]
    training_bytes: list[float]
    segments: list[Segment]
    least_s: float = 0.0

    @classmethod
    def by(cls, model: CallModel, chosen: Assignment, last: Sequence[int]) -> "Left":
        """Returns what the chosen calls leave to the calls without a choice.

        last: these calls.
        """
        shared = []
        for train, users in model.models:
            calls = users if train is None else [train, *users]
            if not set(calls).isdisjoint(last):
                base = model.bases[calls[0]]
                calls = [index for index, own in enumerate(model.bases) if own == base] if base else calls
                here = [one for index in calls if (one := chosen[index])]
                shared.append(tuple((one.where, one.layout.zero, one.layout.offload) for one in here))
        edges = {edge for one in chosen if one for edge in (one.first, one.stop)} | {0, len(model.limits)}
        edges |= {at for at in range(1, len(model.limits)) if model.limits[at] != model.limits[at - 1]}
        left = cls(tuple(shared), [], [], [], [], [])
        for first, stop in pairwise(sorted(edges)):
            parts = model.parts_at(chosen, first)
            free = model.limits[first] - parts.peak
            only_trains = model.ahead and any(one.first <= first < one.stop for i in model.trains if (one := chosen[i]))
            left.training_bytes += [free if only_trains else inf] * (stop - first)
            free = -inf if only_trains else free  # the ranks that train have no other calls
            left.free_bytes += [free] * (stop - first)
            left.gathered_bytes += [parts.gathered] * (stop - first)
            left.activation_bytes += [max(parts.activations, parts.cache - parts.gradients)] * (stop - first)
            left.segments.append((first, stop, free, free + parts.gathered))
        return left

    def covers(self, other: "Left", seconds: float) -> bool:
        """Returns whether this proves that these calls take no less than some seconds with the resources of `other`,
        too."""
        return (
            self.least_s >= seconds
            and self.shared == other.shared
            and all(map(ge, self.free_bytes, other.free_bytes))
            and all(map(ge, self.gathered_bytes, other.gathered_bytes))
            and all(map(ge, self.activation_bytes, other.activation_bytes))
            and all(map(ge, self.training_bytes, other.training_bytes))
        )


@dataclass(frozen=True, slots=True)
class _Options:
    """Candidates of one call, as arrays: seconds [C]; needs [4, C]: first place, last + 1, and the bytes that a
    candidate adds there, static and gathered."""

    candidates: tuple[Candidate, ...]
    seconds_C: np.ndarray
    needs_4C: np.ndarray

    def take(self, at: np.ndarray) -> "_Options":
        return _Options(tuple(self.candidates[i] for i in at.tolist()), self.seconds_C[at], self.needs_4C[:, at])


@dataclass(slots=True)
class _Rows:
    """Combinations [R] of the calls so far. at_RK: their candidates; end_RK: when each call ends. sets: of every set of
    these calls, what the ranks that they share have to hold [4, R]: first place, last + 1, static bytes, most
    gathered."""

    at_RK: np.ndarray
    end_RK: np.ndarray
    sets: list[np.ndarray]


class LastPhase:
    """last: the calls, in the order of the workflow. candidates: of all calls."""

    def __init__(self, model: CallModel, candidates: Sequence[Sequence[Candidate]], last: Sequence[int]):
        self.model, self.calls = model, tuple(last)
        self.candidates = [candidates[index] for index in last]
        self.known: dict[Shared, list[_Options]] = {}
        self.slowest_s = 1 + sum(max(one.seconds + one.gather_s for one in of) for of in self.candidates)

    def combinations(
        self, chosen: Assignment, left: Left, within_s: float, budget: Budget
    ) -> Iterator[tuple[float, tuple[Candidate, ...]]]:
        """Yields (seconds of the phase, candidates) of combinations that take less than within_s, quick ones first. It
        omits a combination that fits only if another one is at least as good; some combinations do not fit, as their
        activations are not looked at."""
        if left.shared not in self.known:
            self.known[left.shared] = [self._options(chosen, place) for place in range(len(self.calls))]
        options = [
            _unbeaten(some.take(np.nonzero((some.seconds_C < within_s) & _fits(some.needs_4C, left.segments))[0]))
            for some in self.known[left.shared]
        ]
        if not all(one.candidates for one in options):
            return
        start = _Rows(np.zeros((1, 0), dtype=int), np.zeros((1, 0)), [])
        parts = [(rows.end_RK.max(1), rows.at_RK) for rows in _extend(start, options, left.segments, within_s, budget)]
        if parts:
            seconds_R, at_RK = map(np.concatenate, zip(*parts, strict=True))
            for row in np.argsort(seconds_R, kind="stable").tolist():
                picked = (one.candidates[at] for one, at in zip(options, at_RK[row].tolist(), strict=True))
                yield float(seconds_R[row]), tuple(picked)

    def _options(self, chosen: Assignment, place: int) -> _Options:
        """Returns the candidates of a call. One that shares weights adds none of its own (it does on ranks that lack
        them, which the caller checks with CallModel.excess_bytes), nor does a base that an earlier call of the phase
        may have."""
        model, index = self.model, self.calls[place]
        base = model.bases[index]
        bases = {one.copy for other, one in enumerate(chosen) if one and one.base_bytes and model.bases[other] == base}
        follows = any(model.bases[other] == base for other in self.calls[:place])
        train, users = next(of for of in model.models if index in of[1])
        training = None if train is None else chosen[train]
        copies = {one.copy for user in users if (one := chosen[user])}
        rows = []
        for one in self.candidates[place]:
            shares = training is not None and model.pair(one, training)[0]
            spread = shares and training is not None and training.layout.zero == 3
            static = 0 if shares or one.copy in copies else one.static_bytes
            if static and (follows or one.copy in bases):
                static -= one.base_bytes
            gathered = (one.spread_bytes if spread else 0) if shares else one.gathered_bytes
            rows.append((one.seconds + one.gather_s * spread, one.first, one.stop, static, gathered))
        columns = np.array(rows, dtype=float).T
        return _Options(tuple(self.candidates[place]), columns[0], columns[1:])


def _unbeaten(options: _Options) -> _Options:
    """Returns the candidates that no other one with the same mesh, stages and slices, and so the same transfers of
    weights and the same base, beats in seconds and bytes."""
    groups: dict[tuple[Destination, int], list[int]] = {}
    for at, one in enumerate(options.candidates):
        groups.setdefault((one.where, one.base_bytes), []).append(at)
    kept: list[int] = []
    for group in groups.values():
        needs = options.needs_4C[2:]
        costs = ((options.seconds_C[at], *needs[:, at], options.candidates[at].activation_bytes) for at in group)
        kept += unbeaten(zip(costs, group, strict=True))
    return options.take(np.array(sorted(kept), dtype=int))


def _extend(
    rows: _Rows, options: Sequence[_Options], segments: Sequence[Segment], within_s: float, budget: Budget
) -> Iterator[_Rows]:
    """Yields combinations with a candidate of every call, in parts."""
    depth = rows.at_RK.shape[1]
    if depth == len(options):
        yield rows
        return
    one = options[depth]
    size = max(1, MOST_PRODUCTS // max(1, len(one.candidates)))
    for start in range(0, len(rows.at_RK), size):
        part = slice(start, start + size)
        some = _Rows(rows.at_RK[part], rows.end_RK[part], [needs_4R[:, part] for needs_4R in rows.sets])
        budget.taken += -(-len(some.at_RK) * len(one.candidates) // PRODUCTS)
        longer = _joined(some, one, segments, within_s, options[:depth])
        if len(longer.at_RK):
            yield from _extend(longer, options, segments, within_s, budget)


def _joined(
    rows: _Rows, one: _Options, segments: Sequence[Segment], within_s: float, before: Sequence[_Options]
) -> _Rows:
    """Returns every combination with every candidate of the next call that is quick enough and fits."""
    first_C, stop_C, _, _ = one.needs_4C
    begin_RC = np.zeros((len(rows.at_RK), len(one.candidates)))
    for call, options in enumerate(before):
        first_R1, stop_R1 = options.needs_4C[:2, rows.at_RK[:, call], None]
        meet_RC = (first_R1 < stop_C) & (first_C < stop_R1)
        begin_RC = np.maximum(begin_RC, meet_RC * rows.end_RK[:, call, None])
    row_N, at_N = np.nonzero(begin_RC + one.seconds_C < within_s)
    mine_4N = one.needs_4C[:, at_N]
    keep_N, sets = np.ones(len(row_N), dtype=bool), []
    for needs_4R in rows.sets:
        (first_N, stop_N, static_N, gathered_N), mine = needs_4R[:, row_N], mine_4N
        latest_N, earliest_N = np.maximum(first_N, mine[0]), np.minimum(stop_N, mine[1])
        both_4N = np.stack([latest_N, earliest_N, static_N + mine[2], np.maximum(gathered_N, mine[3])])
        keep_N &= _fits(both_4N, segments)
        sets.append(both_4N)
    old = [needs_4R[:, row_N[keep_N]] for needs_4R in rows.sets]
    new = [needs_4N[:, keep_N] for needs_4N in (*sets, mine_4N)]
    row_N, at_N = row_N[keep_N], at_N[keep_N]
    end_N = begin_RC[row_N, at_N] + one.seconds_C[at_N]
    at_NK = np.concatenate([rows.at_RK[row_N], at_N[:, None]], 1)
    return _Rows(at_NK, np.concatenate([rows.end_RK[row_N], end_N[:, None]], 1), old + new)


def _fits(needs_4N: np.ndarray, segments: Sequence[Segment]) -> np.ndarray:
    """Returns whether all places from `first` to `stop` (if any) have so many free bytes."""
    first_N, stop_N, static_N, gathered_N = needs_4N
    fits_N = np.ones(len(first_N), dtype=bool)
    for first, stop, free, free_and_gathered in segments:
        if free < inf:
            here_N = (first_N < stop) & (first < stop_N) & (first_N < stop_N)
            enough_N = (static_N <= free) & (static_N + gathered_N <= free_and_gathered)
            fits_N &= enough_N | ~here_N
    return fits_N
