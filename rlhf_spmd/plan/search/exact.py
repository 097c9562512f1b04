"""The best placement in the call-level model, with a proof: branch and bound over the candidates of every call.

Calls are chosen one after another, those that train first. A partial choice is dropped once its ranks are too full or
no completion can be faster than the best choice so far. The bound is a sum over phases (iteration_model.py), since a
phase depends on all earlier phases. Two calls of one phase either share a rank, and take as long as both together, or
share none, and the second one has only the ranks that the first one leaves. While streaming, phases overlap: then the
bound is one whole phase and one mini-batch of each other phase. One iteration ahead, the phases that sample and those
that train are two lines, whose bound is the larger of both sums.

Two things make it quick. The calls that only infer are chosen last and together (inference_phase.py), unless that has
failed before with at least as much memory and time. And the search first looks only for choices nearly as fast as the
bounds, then step by step for slower ones, because bounds prune poorly far from the optimum.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from rlhf_spmd.plan.calls import Infer
from rlhf_spmd.plan.search.budget import Budget
from rlhf_spmd.plan.search.candidates import Candidate, Destination, are_beaten
from rlhf_spmd.plan.search.inference_phase import LastPhase, Left
from rlhf_spmd.plan.search.iteration_model import CallModel

Choice = tuple[Candidate, ...]
FIRST_EXCESS, LAST_EXCESS = 0.02, 3.0  # over the sum of the bounds: the first limit, which doubles up to the last
MORE_LAST = 1.15  # factor by which the limit for the last phase grows


@dataclass(frozen=True, slots=True)
class Space:
    """The search space: a model of the iteration and the candidates of each of its calls, quick ones first."""

    model: CallModel
    candidates: tuple[tuple[Candidate, ...], ...]

    @classmethod
    def of(cls, model: CallModel) -> "Space":
        """Returns all candidates, without those that no device can hold even alone, if there are others."""
        candidates = []
        for index, call in enumerate(model.calls):
            every = model.costs.candidates(call)
            alone: list[Candidate | None] = [None] * len(model.calls)
            fits: dict[int, bool] = {}  # candidates that differ only in their mesh share a layout
            for one in every:
                if id(one.layout) not in fits:
                    alone[index] = one
                    fits[id(one.layout)] = model.excess_bytes(alone) <= 0
            candidates.append(tuple(one for one in every if fits[id(one.layout)]) or every)
        return cls(model, tuple(candidates))


@dataclass(slots=True)
class Best:
    """The best scored choices, at most `keep`, one for each combination of meshes and grids.

    most_s: slower choices are not searched for.
    """

    keep: int
    most_s: float = inf
    found: dict[tuple[Destination, ...], tuple[float, Choice]] = field(default_factory=dict)
    seconds: float = inf
    num_scored: int = 0

    @property
    def goal_s(self) -> float:
        """Only faster choices than this are searched for."""
        return min(self.seconds, self.most_s)

    def offer(self, seconds: float, chosen: Sequence[Candidate]) -> None:
        """Records a choice that fits."""
        key = tuple(one.where for one in chosen)
        if key not in self.found or seconds < self.found[key][0]:
            self.found[key] = seconds, tuple(chosen)
        self.seconds = min(self.seconds, seconds)
        if len(self.found) > 8 * self.keep:
            self.found = dict(sorted(self.found.items(), key=lambda item: item[1][0])[: self.keep])

    @property
    def choices(self) -> list[tuple[float, Choice]]:
        return sorted(self.found.values(), key=lambda one: one[0])[: self.keep]


def exact(space: Space, best: Best, budget: Budget) -> float:
    """Searches until nothing better than `best` can remain or the budget is spent. Returns a lower bound of the seconds
    of all choices; it equals those of `best` if the search has finished."""
    bounds_s = [alone_s(space, phase, budget) for phase in space.model.phases]
    excess = FIRST_EXCESS
    while True:  # a low limit leaves little to search
        best.most_s = (1 + excess) * longest_s(space.model, bounds_s) if excess < LAST_EXCESS else inf
        open_s = _Branches(space, best, budget, bounds_s).search()
        if space.model.can_stream:
            open_s = min(open_s, _Branches(space, best, budget, [0.0, 0.0], streaming=True).search())
        if open_s < inf or best.seconds <= best.most_s:
            break
        excess *= 2
    open_s, best.most_s = min(open_s, best.goal_s), inf
    return open_s


def longest_s(model: CallModel, phases_s: Sequence[float]) -> float:
    """Returns seconds of the longest line of phases."""
    return max(sum(phases_s[phase] for phase in line) for line in model.lines)


def alone_s(space: Space, phase: list[int], budget: Budget) -> float:
    """Returns a lower bound of a phase's seconds: its best choice if no other call needs memory."""
    best = Best(1)
    branches = _Branches(space, best, budget, [0.0] * len(space.model.phases), only=phase)
    return min(branches.search(), best.seconds)


class _Branches:
    """One search of iterations that do not stream, or of those that do."""

    def __init__(
        self,
        space: Space,
        best: Best,
        budget: Budget,
        bounds_s: Sequence[float],
        *,
        streaming: bool = False,
        only: Sequence[int] | None = None,
    ):
        """Prepares the search.

        bounds_s: the least seconds of each phase.
        only: the calls to choose for; None: all.
        """
        self.model, self.best, self.budget, self.streaming = space.model, best, budget, streaming
        model = space.model
        self.chosen: list[Candidate | None] = [None] * len(model.calls)
        phases = [model.others, model.trains] if streaming else model.phases
        self.phases = [[index for index in phase if only is None or index in only] for phase in phases]
        self.phase_of = {index: number for number, phase in enumerate(self.phases) for index in phase}
        last = self._last_phase()
        models = sorted(model.models, key=lambda of: (of[0] is None, of[1]))
        order = [index for train, users in models for index in ([] if train is None else [train]) + users]
        self.order = [index for index in order if index in self.phase_of and index not in last]
        self.order.sort(key=lambda index: index not in model.trains)
        self.num_training = sum(index in model.trains for index in self.order)  # which come first
        self.last = LastPhase(model, space.candidates, last) if last else None
        self.begun: list[tuple[list[float], list[Candidate | None]]] = []  # bounds, choices of all other calls
        self.failed: list[Left] = []
        self.trained: dict[tuple[object, ...], list[tuple[float, ...]]] = {}  # costs of choices for these calls
        self.calls = sorted(self.phase_of)
        self.users = {user for train, users in model.models if train is not None for user in users}
        epochs, num = model.workload.epochs, model.workload.num_mini_batches
        self.times = [num * (epochs if i in model.trains else 1) for i in range(len(model.calls))]  # pieces of each
        self.is_apart = streaming or model.ahead > 0  # training has ranks of its own
        self.room = len(model.limits)  # number of ranks for the calls before training
        self.early = [number for number, phase in enumerate(self.phases) if not set(phase) & set(model.trains)]
        self.groups = [self._by_mesh(index, of) for index, of in enumerate(space.candidates)]
        self.quickest = [self._by_size(index) for index in range(len(model.calls))]
        self.bounds = [max(given, self._phase_s(phase)) for phase, given in enumerate(bounds_s)]
        self.open_s = inf

    def _time_s(self, index: int, one: Candidate) -> float:
        """Returns the seconds of a candidate for a call, of all mini-batches."""
        return one.piece_s * self.times[index] if self.streaming else one.seconds

    def _by_mesh(self, index: int, candidates: Sequence[Candidate]) -> list[list[Candidate]]:
        """Groups candidates by mesh, quick meshes and candidates first."""
        groups: dict[tuple[int, int], list[Candidate]] = {}
        for one in sorted(candidates, key=lambda one: self._time_s(index, one)):
            groups.setdefault((one.first, one.stop), []).append(one)
        return list(groups.values())

    def _by_size(self, index: int) -> tuple[list[int], list[float]]:
        """Returns sizes of meshes, and the fewest seconds of a call on meshes no larger than that."""
        least: dict[int, float] = {}
        for quickest, *_ in self.groups[index]:
            least.setdefault(quickest.stop - quickest.first, self._time_s(index, quickest))
        sizes = sorted(least)
        return sizes, list(accumulate((least[size] for size in sizes), min))

    def _within_s(self, index: int, size: int) -> float:
        """Returns the fewest seconds of a call on so many ranks at most."""
        sizes, seconds = self.quickest[index]
        at = bisect_right(sizes, size)
        return seconds[at - 1] if at else inf

    def search(self) -> float:
        """Returns the least bound of the branches that were skipped when the budget was spent; infinity if none was."""
        self._visit(0)
        for bounds, chosen in sorted(self.begun, key=lambda one: sum(one[0])):
            self.bounds, self.chosen = bounds, chosen
            if self.last is not None and self._bound_s() < self.best.goal_s:
                self._finish(self.last)
        return self.open_s

    def _last_phase(self) -> list[int]:
        """Returns the calls that are chosen last: those of the largest phase that only infers, each with another model;
        other calls affect them only through memory."""

        def is_last(phase: Sequence[int]) -> bool:
            calls = [self.model.calls[index] for index in phase]
            models = {call.model for call in calls}
            infers = all(isinstance(call, Infer) for call in calls) and set(phase) <= set(self.model.others)
            return infers and len(models) == len(phase) > 1

        return [] if self.streaming else max(filter(is_last, self.phases), key=len, default=[])

    def _finish(self, last: LastPhase) -> None:
        """Chooses for the last phase, unless that has failed before with as much memory and time."""
        if self.budget.is_spent:
            self.open_s = min(self.open_s, self._bound_s())
            return
        phase = self.phase_of[last.calls[0]]
        (line,) = (line for line in self.model.lines if phase in line)
        phase_s = self.bounds[phase]
        others_s = sum(self.bounds[number] for number in line) - phase_s
        left = Left.by(self.model, self.chosen, last.calls)
        if any(one.covers(left, self.best.goal_s - others_s) for one in self.failed):
            return
        left.least_s, seen_s = inf, 0.0
        while seen_s < min(self.best.goal_s - others_s, last.slowest_s) and self._bound_s() < self.best.goal_s:
            phase_s *= MORE_LAST  # few are that quick, so they are looked at first
            self._choose_last(last, left, seen_s, phase_s, others_s)
            seen_s = phase_s
        left.least_s = min(left.least_s, self.best.goal_s - others_s)
        self.failed.append(left)
        for index in last.calls:
            self.chosen[index] = None

    def _choose_last(self, last: LastPhase, left: Left, least_s: float, most_s: float, others_s: float) -> None:
        """Yields all choices for the last phase that take from least_s to most_s."""
        most_s = min(most_s, self.best.goal_s - others_s)
        for phase_s, picked in last.combinations(self.chosen, left, most_s, self.budget):
            if max(others_s + phase_s, self._bound_s()) >= self.best.goal_s:
                break
            if phase_s >= least_s:
                for index, one in zip(last.calls, picked, strict=True):
                    self.chosen[index] = one
                self.budget.taken += 1
                if self.model.excess_bytes(self.chosen) <= 0:
                    left.least_s = min(left.least_s, phase_s)  # weights on their way may have made it slower
                    self._leaf()

    def _visit(self, depth: int) -> None:
        if depth == len(self.order):
            if self.last is None:
                self._leaf()
            else:
                self.begun.append((list(self.bounds), list(self.chosen)))
            return
        index = self.order[depth]
        if self.model.ahead and depth == self.num_training and self._is_beaten():
            return
        phase, saved, room = self.phase_of[index], list(self.bounds), self.room
        # bound with the quickest candidate, for meshes that meet the same others
        least_s: dict[tuple[object, ...], float] = {}
        for group in self.groups[index]:
            quickest, quickest_s = group[0], self._time_s(index, group[0])
            self.chosen[index], self.room = None, room
            self.bounds[phase] = max(saved[phase], quickest_s)
            if self._bound_s() >= self.best.goal_s:
                break  # so are all slower meshes
            if self.is_apart and index in self.model.trains:
                self.chosen[index] = quickest
                self.room = self._room()
            meets = (o and o.first < quickest.stop and quickest.first < o.stop for o in self.chosen)
            alike = quickest.stop - quickest.first, quickest_s, self.room, *meets
            if least_s.get(alike, 0.0) >= self.best.goal_s:
                continue
            for one in group:
                self.chosen[index] = one
                self.bounds[phase] = max(saved[phase], self._time_s(index, one), self._phase_s(phase))
                if self.is_apart and index in self.model.trains:
                    self.room = self._room()
                    for early in self.early:
                        self.bounds[early] = max(saved[early], self._phase_s(early))
                bound_s = self._bound_s()
                if self.streaming and bound_s < self.best.goal_s:
                    pieces_s = [self._length_s(i) / self.times[i] for i in self.calls]
                    streams = self.model.streams(self.chosen)
                    bound_s = max(bound_s, self.model.streamed_s(self.chosen, pieces_s) if streams else inf)
                if bound_s >= self.best.goal_s:
                    if index in self.users:  # others may not have to gather the weights that they share
                        continue
                    if one is quickest:
                        least_s.setdefault(alike, bound_s)
                    break  # so are the slower candidates on this mesh
                if self.budget.is_spent:
                    self.open_s = min(self.open_s, bound_s)
                    break
                self._go_on(depth, index)
                self.bounds = list(saved)
            self.bounds = list(saved)
        self.chosen[index], self.bounds, self.room = None, saved, room

    def _is_beaten(self) -> bool:
        """Returns, one iteration ahead, whether other choices for the calls that train, on the same ranks in the same
        grids, were as fast and needed no more memory. They matter to calls that sample through nothing else, as they
        share no ranks."""
        model, chosen = self.model, [one if i in self.model.trains else None for i, one in enumerate(self.chosen)]
        ways = [(one.where, one.layout.zero == 3) for one in chosen if one]
        places = sorted({place for one in chosen if one for place in (one.first, one.stop % len(model.limits))})
        costs = model.schedule_s(chosen, model.trains), *(model.parts_at(chosen, place).peak for place in places)
        front = self.trained.setdefault(tuple(ways), [])
        if are_beaten(costs, front):
            return True
        front.append(costs)
        return False

    def _go_on(self, depth: int, index: int) -> None:
        """Visits the next call, unless the last choice is already too slow or too large."""
        if index in self.users and not self.streaming:
            for late in set(range(len(self.phases))).difference(self.early):
                self.bounds[late] = max(self.bounds[late], self._phase_s(late))
            if self._bound_s() >= self.best.goal_s:
                return
        self.budget.taken += 1
        if self.model.excess_bytes(self.chosen, stream=self.streaming) <= 0:
            self._visit(depth + 1)

    def _leaf(self) -> None:
        model = self.model
        seconds = model.streamed_s(self.chosen) if self.streaming else model.schedule_s(self.chosen, self.calls)
        full = [one for one in self.chosen if one is not None]
        if len(full) < len(self.chosen):
            self.best.seconds = min(self.best.seconds, seconds)
            return
        self.best.num_scored += 1
        self.best.offer(seconds, full)

    def _bound_s(self) -> float:
        """Returns a lower bound of all completions of the choice."""
        if not self.streaming:
            return longest_s(self.model, self.bounds)
        num, model = self.model.workload.num_mini_batches, self.model
        piece_s = [
            length_s / times for length_s, times in zip(map(self._length_s, self.calls), self.times, strict=True)
        ]
        before_s = sum(max((piece_s[i] for i in phase if i in model.others), default=0.0) for phase in model.phases)
        after_s = max(piece_s[i] * (1 + self.times[i] - num) for i in model.trains)  # one mini-batch, and later epochs
        return max(self.bounds[0] + after_s, self.bounds[1] + before_s)

    def _room(self) -> int:
        """Returns the number of ranks that do not train."""
        taken = {place for i in self.model.trains if (one := self.chosen[i]) for place in range(one.first, one.stop)}
        return len(self.model.limits) - len(taken)

    def _length_s(self, index: int) -> float:
        one = self.chosen[index]
        if one is None:
            room = self.room if self.is_apart and index in self.model.others else len(self.model.limits)
            return self._within_s(index, room)
        return self._time_s(index, one)

    def _phase_s(self, number: int) -> float:
        """Returns a lower bound of a phase's seconds, whatever is chosen for its other calls."""
        self.budget.taken += 1
        phase, size = self.phases[number], len(self.model.limits)
        if not phase:
            return 0.0
        if self.is_apart and number in self.early:
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
        """Returns the least seconds of two calls without a choice: one after the other, or at once on disjoint
        meshes."""
        together_s = self._length_s(a) + self._length_s(b)
        for mine, mine_s in zip(*self.quickest[a], strict=True):
            if mine < size:
                together_s = min(together_s, max(mine_s, self._within_s(b, size - mine)))
        return together_s
