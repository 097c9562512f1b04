"""The best placement in the call-level model, with a proof: branch and bound over the candidates of every call.

Calls are chosen one after the other; a partial choice is dropped as soon as no completion can be faster than the best
one known, its ranks are too full, or a choice on the same meshes was looked at that is no slower and no fuller. The
bound is a sum over phases (call_model.py): all of a phase needs all of the phases before it. Two calls of one phase
either share a rank, and take as long as both together, or share none, and the second one has to do with the ranks that
the first one leaves. While streaming, phases overlap: then one of them is seen whole, and one mini-batch of each of the
others.
"""

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from rlhf_spmd.plan.call_costs import Candidate
from rlhf_spmd.plan.call_model import CallModel

Choice = tuple[Candidate, ...]
CHECK_EVERY = 256  # nodes between two looks at the clock
PLAIN_SHARE = 0.7  # of the time, for iterations that do not stream
MOST_STATES = 300  # that are kept to compare with, of each kind


@dataclass(frozen=True, slots=True)
class Space:
    """What may be chosen: candidates of each call of a model of the iteration, quick ones first."""

    model: CallModel
    candidates: tuple[tuple[Candidate, ...], ...]

    @classmethod
    def of(cls, model: CallModel) -> "Space":
        """All candidates; those that no device can hold alone are left out, where there are others."""
        found = []
        for index, call in enumerate(model.calls):
            every = model.costs.candidates(call)
            alone: list[Candidate | None] = [None] * len(model.calls)
            fits: dict[int, bool] = {}  # candidates that differ in their mesh alone share a layout
            for one in every:
                if id(one.layout) not in fits:
                    alone[index] = one
                    fits[id(one.layout)] = model.excess_bytes(alone) <= 0
            found.append(tuple(one for one in every if fits[id(one.layout)]) or every)
        return cls(model, tuple(found))


@dataclass(slots=True)
class Best:
    """The best choices that were scored, at most `keep`, best first; those with equal meshes and grids count once."""

    keep: int
    tolerance: float = 0.0  # what is better by less than this fraction need not be found
    found: dict[tuple, tuple[float, Choice]] = field(default_factory=dict)
    seconds: float = inf
    num_scored: int = 0

    @property
    def goal_s(self) -> float:
        """What is not faster than this is not looked for."""
        return self.seconds * (1 - self.tolerance)

    def offer(self, seconds: float, chosen: Sequence[Candidate]) -> None:
        """Notes a choice that fits."""
        key = tuple(one.where for one in chosen)
        if key not in self.found or seconds < self.found[key][0]:
            self.found[key] = seconds, tuple(chosen)
        self.seconds = min(self.seconds, seconds)
        if len(self.found) > 8 * self.keep:
            self.found = dict(sorted(self.found.items(), key=lambda item: item[1][0])[: self.keep])

    @property
    def choices(self) -> list[tuple[float, Choice]]:
        return sorted(self.found.values(), key=lambda one: one[0])[: self.keep]


def exact(space: Space, best: Best, budget_s: float = inf) -> float:
    """Searches until nothing better than `best` can be left, or the budget is spent. Returns the optimality gap: by
    which fraction a better choice might still be faster; 0.0 if there is none."""
    begin_s = time.perf_counter()
    deadline = begin_s + budget_s
    share_s = begin_s + PLAIN_SHARE * budget_s if space.model.can_stream else deadline
    bounds_s = [alone_s(space, phase, share_s, best.tolerance / 2) for phase in space.model.phases]
    open_s = _Branches(space, best, share_s, bounds_s).search()
    if space.model.can_stream:
        open_s = min(open_s, _Branches(space, best, deadline, [0.0, 0.0], streaming=True).search())
    return 1 - min(open_s, best.goal_s) / best.seconds if best.seconds < inf else 1.0


def alone_s(space: Space, phase: list[int], deadline: float, tolerance: float = 0.0) -> float:
    """A phase takes no less, even if nothing else needs memory; tolerance: by how much this may be less than exact."""
    best = Best(1, tolerance)
    branches = _Branches(space, best, deadline, [0.0] * len(space.model.phases), only=phase)
    return min(branches.search(), best.goal_s)


@dataclass(frozen=True, slots=True)
class _State:
    """What matters of a partial choice, beside its meshes. whole_s: of phases that are complete; parts_s: of other
    calls and of weights; sizes: bytes at each place, with every kind that later calls may need more of and without."""

    whole_s: float
    parts_s: tuple[float, ...]
    sizes: tuple[float, ...]

    def beats(self, other: "_State") -> bool:
        """A second more of one call makes an iteration longer by a second at most."""
        more_s = self.whole_s - other.whole_s
        if more_s > 0:
            return False
        for mine_s, other_s in zip(self.parts_s, other.parts_s, strict=True):
            if mine_s > other_s:
                more_s += mine_s - other_s
        return more_s <= 0 and all(a <= b for a, b in zip(self.sizes, other.sizes, strict=True))


class _Branches:
    """One search, either of iterations that do not stream or of those that do."""

    def __init__(
        self,
        space: Space,
        best: Best,
        deadline: float,
        bounds_s: Sequence[float],
        *,
        streaming: bool = False,
        only: Sequence[int] | None = None,
    ):
        """bounds_s: of each phase what it takes at least. only: the calls to choose for; None: all."""
        self.model, self.best, self.deadline, self.streaming = space.model, best, deadline, streaming
        model = space.model
        self.chosen: list[Candidate | None] = [None] * len(model.calls)
        phases = [model.others, model.trains] if streaming else model.phases
        self.phases = [[index for index in phase if only is None or index in only] for phase in phases]
        self.phase_of = {index: number for number, phase in enumerate(self.phases) for index in phase}
        models = sorted(model.models, key=lambda of: (of[0] is None, of[1]))
        order = [index for train, users in models for index in ([] if train is None else [train]) + users]
        self.order = [index for index in order if index in self.phase_of]
        if streaming:
            self.order.sort(key=lambda index: index not in model.trains)
        self.late = {self.phase_of[index] for index in model.trains if index in self.phase_of}
        self.calls = sorted(self.order)
        self.users = {user for train, users in model.models if train is not None for user in users}
        epochs, num = model.workload.epochs, model.workload.num_mini_batches
        self.times = [num * (epochs if i in model.trains else 1) for i in range(len(model.calls))]  # pieces of each
        self.room = len(model.limits)  # ranks that calls before training may have
        self.groups = [self._by_mesh(index, of) for index, of in enumerate(space.candidates)]
        self.quickest = [self._by_size(index) for index in range(len(model.calls))]
        self.bounds = [max(given, self._phase_s(phase)) for phase, given in enumerate(bounds_s)]
        self.nodes, self.open_s, self.expired = 0, inf, False
        self.seen: dict[tuple, list[_State]] = {}

    def _by_mesh(self, index: int, candidates: Sequence[Candidate]) -> list[tuple[int, int, list]]:
        """(first, stop, [(seconds, candidate)]) of each mesh, quick meshes and candidates first."""
        found: dict[tuple[int, int], list[tuple[float, Candidate]]] = {}
        for one in candidates:
            length_s = one.piece_s * self.times[index] if self.streaming else one.seconds
            found.setdefault((one.first, one.stop), []).append((length_s, one))
        groups = [(*span, sorted(group, key=lambda pair: pair[0])) for span, group in found.items()]
        return sorted(groups, key=lambda group: group[2][0][0])

    def _by_size(self, index: int) -> tuple[list[int], list[float]]:
        """Sizes of meshes, and the fewest seconds of a call on meshes no larger than that."""
        least: dict[int, float] = {}
        for first, stop, group in self.groups[index]:
            least[stop - first] = min(least.get(stop - first, inf), group[0][0])
        sizes = sorted(least)
        seconds = [min(least[size] for size in sizes[: at + 1]) for at in range(len(sizes))]
        return sizes, seconds

    def _within_s(self, index: int, size: int) -> float:
        """The fewest seconds of a call on so many ranks at most."""
        sizes, seconds = self.quickest[index]
        at = bisect_right(sizes, size)
        return seconds[at - 1] if at else inf

    def search(self) -> float:
        """Returns the least bound among what was left out because the time was up; infinity if nothing was."""
        self._visit(0)
        return self.open_s

    def _visit(self, depth: int) -> None:
        if depth == len(self.order):
            self._leaf()
            return
        index = self.order[depth]
        phase, saved, room = self.phase_of[index], list(self.bounds), self.room
        least_s: dict[tuple, float] = {}  # bound with the quickest candidate on meshes that relate alike to the others
        for first, stop, group in self.groups[index]:
            self.chosen[index], self.room = None, room
            self.bounds[phase] = max(saved[phase], group[0][0])
            if self._bound_s() >= self.best.goal_s:
                break  # so are all slower meshes
            alike = stop - first, group[0][0], *(o and o.first < stop and first < o.stop for o in self.chosen)
            if least_s.get(alike, 0.0) >= self.best.goal_s:
                continue
            for length_s, one in group:
                self.nodes += 1
                if self.nodes % CHECK_EVERY == 0 and time.perf_counter() > self.deadline:
                    self.expired = True
                self.chosen[index], self.room = one, room
                self.bounds[phase] = max(saved[phase], length_s, self._phase_s(phase))
                bound_s = self._bound_s()
                if bound_s >= self.best.goal_s:
                    if index in self.users:  # others may not have to gather the weights that they share
                        continue
                    if one is group[0][1]:
                        least_s.setdefault(alike, bound_s)
                    break  # so are the slower candidates on this mesh
                if self.expired:
                    self.open_s = min(self.open_s, bound_s)
                    break
                self._go_on(depth, index)
                self.bounds = list(saved)
            self.bounds = list(saved)
        self.chosen[index], self.bounds, self.room = None, saved, room

    def _go_on(self, depth: int, index: int) -> None:
        """Visits the next call, unless the last choice has made that pointless."""
        if index in self.users and not self.streaming:
            for late in self.late:
                self.bounds[late] = max(self.bounds[late], self._phase_s(late))
            if self._bound_s() >= self.best.goal_s:
                return
        if self.streaming:
            if not self.model.streams(self.chosen):
                return
            taken = {
                place for i in self.model.trains if (one := self.chosen[i]) for place in range(one.first, one.stop)
            }
            self.room = len(self.model.limits) - len(taken)
            if index in self.model.trains:
                self.bounds[0] = max(self.bounds[0], self._phase_s(0))
            least_s = [self._length_s(i) / self.times[i] for i in self.calls]
            if max(self._bound_s(), self.model.streamed_s(self.chosen, least_s)) >= self.best.goal_s:
                return
        if self.model.excess_bytes(self.chosen) <= 0 and not self._beaten(depth + 1):
            self._visit(depth + 1)

    def _beaten(self, depth: int) -> bool:
        """Whether a choice for the same calls on the same meshes was looked at that no completion can make worse than
        this one: it leaves as much room on every rank, and takes no longer."""
        if depth == len(self.order):
            return False
        model, chosen, done = self.model, self.chosen, set(self.order[:depth])
        key: list[object] = [depth]
        for train, users in model.models:
            calls = users if train is None else [train, *users]
            is_open = not done.issuperset(calls)
            for one in (chosen[index] for index in calls if index in done):
                layout = one.layout
                key.append((one.where, layout.zero, layout.offload) if is_open else (one.first, one.stop))
        whole_s, parts_s = 0.0, []
        for number, phase in enumerate(self.phases):
            if phase and done.issuperset(phase) and number not in self.late and not self.streaming:
                whole_s += self.bounds[number]
            else:
                parts_s += [self._length_s(index) + model.gather_s(chosen, index) for index in phase if index in done]
        for train, users in model.models:
            if train in done:
                parts_s += [model.pair(chosen[user], chosen[train])[1] for user in users if user in done]
        sizes: list[float] = []
        for place in sorted(model.places(chosen)):
            static, gathered, reduced, activations, cache = model.parts_at(chosen, place)
            for besides in (0.0, gathered):
                least = static + besides
                sizes += (least, least + activations, least + reduced, least + activations + reduced, least + cache)
        mine = _State(whole_s, tuple(parts_s), tuple(sizes))
        others = self.seen.setdefault(tuple(key), [])
        if any(other.beats(mine) for other in others):
            return True
        if len(others) < MOST_STATES:
            others.append(mine)
        return False

    def _leaf(self) -> None:
        model, full = self.model, len(self.order) == len(self.chosen)
        seconds = model.streamed_s(self.chosen) if self.streaming else model.schedule_s(self.chosen, self.calls)
        if not full:
            self.best.seconds = min(self.best.seconds, seconds)
            return
        self.best.num_scored += 1
        self.best.offer(seconds, self.chosen)

    def _bound_s(self) -> float:
        """No completion of what is chosen is faster."""
        if not self.streaming:
            return sum(self.bounds)
        num, model = self.model.workload.num_mini_batches, self.model
        piece_s = [
            length_s / times for length_s, times in zip(map(self._length_s, self.calls), self.times, strict=True)
        ]
        before_s = sum(max((piece_s[i] for i in phase if i in model.others), default=0.0) for phase in model.phases)
        after_s = max(piece_s[i] * (1 + self.times[i] - num) for i in model.trains)  # one mini-batch, and later epochs
        return max(self.bounds[0] + after_s, self.bounds[1] + before_s)

    def _length_s(self, index: int) -> float:
        one = self.chosen[index]
        if one is None:
            room = self.room if self.streaming and index in self.model.others else len(self.model.limits)
            return self._within_s(index, room)
        return one.piece_s * self.times[index] if self.streaming else one.seconds

    def _phase_s(self, number: int) -> float:
        """A phase takes no less, whatever is chosen for its other calls."""
        phase, size = self.phases[number], len(self.model.limits)
        if not phase:
            return 0.0
        if self.streaming and number == 0:
            size = self.room
        chosen = [self.chosen[index] for index in phase]
        lengths = [self._length_s(index) for index in phase]
        longest_s = max(lengths)
        if not self.streaming and any(chosen):
            longest_s = max(longest_s, self.model.schedule_s(self.chosen, phase))
        for a, one in enumerate(chosen):
            for b, other in enumerate(chosen):
                if one is None and other is None and b > a:
                    longest_s = max(longest_s, self._apart_s(phase[a], phase[b], size))
                elif one is not None and other is None:
                    left_s = self._within_s(phase[b], size - (one.stop - one.first))
                    longest_s = max(longest_s, min(lengths[a] + lengths[b], left_s))
        return longest_s

    def _apart_s(self, a: int, b: int, size: int) -> float:
        """Two calls that are not chosen: one after the other, or at the same time on meshes that fit side by side."""
        together_s = self._length_s(a) + self._length_s(b)
        for mine, mine_s in zip(*self.quickest[a], strict=True):
            if mine < size:
                together_s = min(together_s, max(mine_s, self._within_s(b, size - mine)))
        return together_s
