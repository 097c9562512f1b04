"""The order in which the iterations use prompts: a pure function of the seed, the same on any number of ranks.

Without weights all files are one set. Iterations run through its epochs, each a permutation of all prompts (or, without
shuffling, their order in the files). With weights each file is a set of its own with its own epochs. Which file gives
the next prompt is fixed: the prompt k (from 0) of a file with weight w has the time (k + 1/2) / w, and prompts come in
the order of their times. Of n prompts a file gives n w, to within a prompt or two, so that every iteration has the
mixture of the weights.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial

import numpy as np


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """Which prompts each iteration uses.

    sizes: number of prompts of each file, whose indices follow each other.
    weights: of the files.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int = 0
    shuffle: bool = True
    _epoch: dict[tuple[int, int], tuple[int, np.ndarray]] = field(default_factory=dict, repr=False, compare=False)

    def batch(self, iteration: int, rollout_batch: int) -> list[int]:
        """Returns the indices of the prompts of one iteration (from 0). It repeats no prompt where that can be avoided:
        within a set it does not, unless the set gives more prompts to an iteration than it has."""
        given, shares = self._given(iteration * rollout_batch), self._shares()
        files: list[int] = []
        after = list(given)
        for _ in range(rollout_batch):
            files.append(_next(after, shares))
            after[files[-1]] += 1
        taken = []
        for file, size in enumerate(self.sizes):
            first, num = sum(self.sizes[:file]), after[file] - given[file]
            taken.append(iter(self._take(file, first, size, iteration, given[file], num, rollout_batch)))
        return [next(taken[file]) for file in files]

    # ---- which file gives the next prompt ---------------------------------------------------------------------------

    def _shares(self) -> list[Fraction]:
        """Returns the weights as exact shares that add up to 1."""
        exact = [Fraction(repr(weight)) for weight in self.weights]
        return [weight / sum(exact) for weight in exact]

    def _given(self, num_prompts: int) -> list[int]:
        """Returns how many of the first `num_prompts` prompts each file gives."""
        shares = self._shares()
        # before this time there are at most num_prompts: each file has given its share of it, plus a half at most
        time = num_prompts - len(shares)
        given = [max(0, math.ceil(time * share - Fraction(1, 2))) for share in shares]
        for _ in range(num_prompts - sum(given)):
            given[_next(given, shares)] += 1
        return given

    def _start(self, file: int, iteration: int, rollout_batch: int) -> int:
        """Returns how many prompts a set has given before an iteration."""
        return self._given(iteration * rollout_batch)[file]

    # ---- the epochs of one set --------------------------------------------------------------------------------------

    def _take(
        self, file: int, first: int, size: int, iteration: int, start: int, num: int, rollout_batch: int
    ) -> list[int]:
        """Returns the `num` prompts that a set of `size` prompts, from index `first` on, gives to an iteration.

        start: how many it has given before.
        """
        epoch, place = divmod(start, size)
        picked: list[int] = []
        while len(picked) < num:
            order = self._order(file, size, epoch, iteration, rollout_batch)
            picked += (first + order[place : place + num - len(picked)]).tolist()
            epoch, place = epoch + 1, 0
        return picked

    def _order(self, file: int, size: int, epoch: int, iteration: int, rollout_batch: int) -> np.ndarray:
        """Returns the order of one epoch, which begins in this iteration or before. It depends on the end of the
        previous epoch, back to one that begins together with an iteration."""
        if not self.shuffle:
            return np.arange(size)
        known, order = self._epoch.get((file, rollout_batch), (-1, None))
        if order is None or known > epoch:
            known, order = -1, None
        todo = []
        for later in range(epoch, known, -1):
            before, after = self._around(file, later * size, iteration, rollout_batch)
            todo.append((later, before, after))
            if before == 0:
                break
        for later, before, after in reversed(todo):
            fresh = permutation(self.seed, later, size, file)
            if before:
                assert order is not None, "the first epoch begins together with an iteration"
                fresh = _without_repeats(fresh, order, before, after)
            order = fresh
        assert order is not None  # known, or made here
        self._epoch[file, rollout_batch] = (epoch, order)  # a cache: iterations come in order
        return order

    def _around(self, file: int, place: int, iteration: int, rollout_batch: int) -> tuple[int, int]:
        """Returns how many prompts the iteration that takes this place of a set takes before it, and from it on."""
        starts = partial(self._start, file, rollout_batch=rollout_batch)
        last = bisect_right(range(1, iteration + 1), place, key=starts)  # that starts at the place or before
        return place - starts(last), starts(last + 1) - place


def _next(given: Sequence[int], shares: Sequence[Fraction]) -> int:
    """Returns the file of the next prompt, when each has given so many: the one with the earliest time."""
    times = [(2 * num + 1) / (2 * share) for num, share in zip(given, shares, strict=True)]
    return times.index(min(times))


def permutation(seed: int, epoch: int, size: int, file: int = 0) -> np.ndarray:
    """Returns the permutation of one epoch."""
    # Sorts raw Philox words, because numpy guarantees stable bits for them, but not for Generator.permutation. The
    # first bit of the counter separates this stream from that of algorithms/training_order.py, which has the same key.
    counter = (1 << 255) | (file << 192) | (epoch << 128)
    words = np.random.Philox(key=seed % 2**64, counter=counter).random_raw(size)
    return np.argsort(words, kind="stable")


def _without_repeats(order: np.ndarray, previous: np.ndarray, num_before: int, num_after: int) -> np.ndarray:
    """Reorders an epoch so that its first `num_after` prompts exclude the last `num_before` of the previous epoch."""
    if num_before == 0 or num_before + num_after > len(order):
        return order
    first = np.flatnonzero(~np.isin(order, previous[-num_before:]))[:num_after]
    return np.concatenate([order[first], np.delete(order, first)])
