"""The data of one iteration on one rank: of every key the rows that the rank reads, makes or receives, and no others.

Rows of an iteration lie in a matrix [M mini-batches, C columns], and a rank holds whole columns of it. Everybody names
them by their number in the whole matrix; where they lie on this rank is known here alone.
"""

# M mini-batches, C columns (= mini_batch), B sequences, P prompt tokens, G response tokens

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.kernels.philox import random_bits
from rlhf_spmd.plan.words import TOKEN_SHAPES
from rlhf_spmd.plan.workload import Workload
from rlhf_spmd.runtime.generation.rollout import Rollout
from rlhf_spmd.runtime.observe.meter import Meter

Place = tuple[slice, slice]  # mini-batches and columns of the whole matrix
ALL = slice(None)
NUMBERS_AT_ONCE = 2**14  # random numbers: what they are made from stays in the processor's cache


class Store(dict[str, Tensor]):
    """Data key -> tensor [M, columns of this rank, ...], made when it is first needed: -1 where tokens are to come,
    0 elsewhere."""

    def __init__(self, workload: Workload, columns: Mapping[str, Sequence[range]], device: torch.device | str = "cpu"):
        """columns: of every key that this rank holds, ascending (Program.held)."""
        self.workload, self.columns, self.device = workload, columns, device

    def at(self, key: str, place: Place) -> Tensor:
        """The rows at a place, [M', C', ...], to be read or written."""
        if key not in self:
            self[key] = self.make(key)
        return self[key][place[0], self._local(key, place[1])]

    def make(self, key: str) -> Tensor:
        """A tensor for all rows that this rank holds of a key."""
        workload = self.workload
        rows = (workload.num_mini_batches, sum(map(len, self.columns.get(key, ()))))
        shape = (*rows, *workload.row_shape(key))
        if workload.workflow.shapes[key] in TOKEN_SHAPES:
            return torch.full(shape, -1, dtype=torch.int32, device=self.device)
        return torch.zeros(shape, device=self.device)

    def _local(self, key: str, columns: slice) -> slice:
        """Where columns of the whole matrix, one run of them, lie in this rank's tensor of a key."""
        if columns.start == columns.stop:
            return slice(0, 0)
        before = 0
        for held in self.columns.get(key, ()):
            if held.start <= columns.start and columns.stop <= held.stop:
                start = before + columns.start - held.start
                return slice(start, start + columns.stop - columns.start)
            before += len(held)
        raise AssertionError(f"{key} of columns {columns.start} to {columns.stop - 1} is not held on this rank")


@dataclass(slots=True)
class Iteration:
    """One iteration's data on a rank."""

    number: int
    seed: int
    prompt_MC: np.ndarray  # prompt index of each place, of all rows
    sample_MC: np.ndarray  # sample index
    source_EMC: Tensor  # [epochs, M, C]: the mini-batch of epoch 0 whose row stands here in epoch e
    store: Store
    meter: Meter = field(default_factory=Meter)
    generations: dict[str, Rollout] = field(default_factory=dict)  # engines of calls, while they have anything to do
    generate_s: float = 0.0  # on this rank so far
    stopped: set[str] = field(default_factory=set)  # models that train no more in this iteration

    def random_bits(self, stream: int, columns: slice = ALL) -> Tensor:
        """The random bits of the rows in some columns for each token that they may have, int64 [M, C', G]. stream: what
        the tokens are for (random_streams.py).

        Made when they are generated, for the rows that are generated here, and few at a time: what the generator
        works with takes ten times the memory of its results.
        """
        prompt_B, sample_B = self.prompt_MC[:, columns].flatten(), self.sample_MC[:, columns].flatten()
        width, shape = self.store.workload.max_response, self.prompt_MC[:, columns].shape
        bits_BG, rows = np.empty((len(prompt_B), width), np.int64), max(1, NUMBERS_AT_ONCE // max(width, 1))
        for start in range(0, len(prompt_B), rows):
            part = slice(start, start + rows)
            bits_BG[part] = random_bits(self.seed, stream, self.number, prompt_B[part], sample_B[part], width)
        return torch.from_numpy(bits_BG).unflatten(0, shape).to(self.store.device)
