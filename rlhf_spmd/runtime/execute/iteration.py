"""The data of one iteration on one rank: for every key, the rows that the rank reads, makes or receives.

The rows of an iteration form a matrix [M mini-batches, C columns], and a rank holds whole columns of it. Columns are
named by their number in the whole matrix; only `Store` knows where they are on this rank.
"""

# M mini-batches, C columns (= mini_batch), B sequences, P prompt tokens, G response tokens

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.algorithms.masks import response_mask
from rlhf_spmd.kernels.philox import random_bits
from rlhf_spmd.model.routes import Routes
from rlhf_spmd.model.sequences import Sequences, lengths_of
from rlhf_spmd.plan.adapters import Adapters
from rlhf_spmd.plan.calls import LossCall
from rlhf_spmd.plan.runtime_words import ACTIONS, TOKEN_SHAPES, actions_of, routes_of
from rlhf_spmd.plan.workload import Workload
from rlhf_spmd.runtime.data.prompts import PromptSet
from rlhf_spmd.runtime.data.step_order import NO_ROW
from rlhf_spmd.runtime.generation.rollout import Rollout
from rlhf_spmd.runtime.world.metric_sums import Meter

Rows = dict[str, Tensor]  # data key -> [B, ...]
NUMBER = "number of the row"  # in the iteration, beside the data
Place = tuple[slice, slice]  # mini-batches and columns of the whole matrix
ALL = slice(None)
NUMBERS_AT_ONCE = 2**14  # random numbers: the generator's intermediate results stay in the processor's cache


def mask_of(rows: Mapping[str, Tensor], key: str) -> Tensor:
    """Returns the tokens of responses that an algorithm sees: those that were sampled, which are all unless responses
    have several turns, or that the data set gives: bool [..., G].

    rows: by data key.
    """
    actions = rows.get(actions_of(key))
    return response_mask(rows[key]) if actions is None else actions > 0


def kept_of(workload: Workload, rows: Mapping[str, Tensor], keys: Iterable[str]) -> Tensor:
    """Returns the rows that count: all but episodes that are dropped and responses that go on in the next iteration,
    which have no token that was sampled: bool [...]; without dims where that cannot be: all do.

    rows: by data key.
    keys: those of what was sampled are looked at.
    """
    drawn = [(rows[key] > 0).any(-1) for key in keys if key.endswith(ACTIONS)]
    drawn += [rows[key][..., 0] >= 0 for key in keys if key in workload.may_be_blank]
    return torch.stack(drawn).all(0) if drawn else torch.tensor(True)


def sequences_of(call: LossCall, rows: Rows, dropout: tuple[int, float] | None = None) -> Sequences:
    """Returns the sequences of some rows; of two responses to a prompt, all first ones come before the second. dropout:
    of adapters, its seed and rate; the rows then have a NUMBER."""
    num = len(call.responses)
    made = Sequences.join(torch.cat([rows[call.prompts]] * num), torch.cat([rows[key] for key in call.responses]))
    made = with_routes(made, rows.get(routes_of(call.responses[0])))
    if dropout is None:
        return made
    return replace(made, dropout=(*dropout, torch.cat([rows[NUMBER] * num + index for index in range(num)])))


def with_routes(batch: Sequences, routes_BTLk: Tensor | None) -> Sequences:
    """Gives sequences the experts that their tokens took in generation, uint8; None: there are none. The last token of
    a row took none."""
    if routes_BTLk is None:
        return batch
    length_B = torch.tensor(batch.lengths, device=routes_BTLk.device)
    width = max(batch.lengths)
    routes_BTLk = torch.cat((routes_BTLk, routes_BTLk.new_zeros(len(routes_BTLk), 1, *routes_BTLk.shape[2:])), 1)
    at_BT = torch.arange(width, device=routes_BTLk.device).expand(len(length_B), -1)
    real_BT = at_BT < length_B[:, None]
    took_N = (at_BT < length_B[:, None] - 1)[real_BT]
    return replace(batch, routes=Routes(routes_BTLk[:, :width][real_BT], took_N))


def row_lengths(call: LossCall, rows: Rows) -> list[int]:
    """Returns the tokens of each row: of the prompt with each response that the call reads."""
    of_each = (lengths_of(rows[call.prompts], rows[key]) for key in call.responses)
    return [sum(one) for one in zip(*of_each, strict=True)]


def dropout_of(seed: int, adapters: Adapters | None, model: str, number: int) -> tuple[int, float] | None:
    """Returns the seed and the rate of the dropout in a step of a model; None without.

    seed: of the run.
    adapters: of the model.
    model: its name.
    number: of the step.
    """
    if adapters is None or not adapters.dropout:
        return None
    key = hashlib.sha256(f"{seed} dropout of {model} {number}".encode()).digest()[:8]
    return int.from_bytes(key, "little"), adapters.dropout


class Store(dict[str, Tensor]):
    """Data key -> tensor [M, columns of this rank, ...], allocated at its first use: -1 for tokens, 0 for all else."""

    def __init__(self, workload: Workload, columns: Mapping[str, Sequence[range]], device: torch.device | str = "cpu"):
        """columns: of every key that this rank holds, ascending (Program.held)."""
        self.workload, self.columns, self.device = workload, columns, device

    def at(self, key: str, place: Place) -> Tensor:
        """Returns the rows at a place, [M', C', ...], to be read or written."""
        if key not in self:
            self[key] = self.make(key)
        return self[key][place[0], self._local(key, place[1])]

    def make(self, key: str) -> Tensor:
        """Makes a tensor for all rows that this rank holds of a key."""
        workload, num_columns = self.workload, sum(map(len, self.columns.get(key, ())))
        kind = workload.workflow.shapes[key]
        fill, dtype = (-1, torch.int32) if kind in TOKEN_SHAPES else (0.0, torch.float32)
        fill, dtype = (0, torch.uint8) if kind == "routes" else (fill, dtype)
        shape = (workload.num_mini_batches, num_columns, *workload.row_shape(key))
        return torch.full(shape, fill, dtype=dtype, device=self.device)

    def _local(self, key: str, columns: slice) -> slice:
        """Converts consecutive columns of the whole matrix to those of this rank's tensor of a key."""
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
class Rounds:
    """How far the rounds of an iteration are (plan/program/rounds.py).

    cursor: how many prompts of the data set have been used, in their order, with those of this iteration.
    failed: the groups that were sampled again, by their place in the batch, for each round but the first.
    again_MC: the rows of the newest of these rounds.
    """

    cursor: int
    failed: list[list[int]] = field(default_factory=list)
    again_MC: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))


@dataclass(slots=True)
class Carried:
    """Responses that take several iterations (partial_rollouts.py), of a batch.

    began_MC: the iteration in which the row of each place began.
    rows: what this rank has generated of its rows so far, also of those that go on, which the batch lacks.
    goes_on_MC: the rows that go on in the next iteration, at the same places: all of a group, or none.
    """

    began_MC: np.ndarray
    rows: Store
    goes_on_MC: np.ndarray


@dataclass(slots=True)
class Iteration:
    """One iteration's data on a rank."""

    number: int  # from 0; people count from 1
    seed: int
    prompt_MC: np.ndarray  # prompt index of each row of the whole matrix
    sample_MC: np.ndarray  # sample index
    source_EMC: Tensor  # [epochs, M, C]: for each place in epoch e, the mini-batch of its row in epoch 0
    store: Store
    meter: Meter = field(default_factory=Meter)
    generations: dict[str, Rollout] = field(default_factory=dict)  # engines of calls, while they have anything to do
    generate_s: float = 0.0  # on this rank so far
    num_bytes_sent: int = 0  # by this rank, as num_messages_sent
    num_messages_sent: int = 0
    noted: dict[str, np.ndarray] = field(default_factory=dict)  # numbers of rows for the log, [M, C]; NaN: elsewhere
    what: str = "iteration"  # the word before the number in messages
    first: int = 1  # what messages call number 0
    lag: int = 0  # iterations that have trained between drawing it and training on it
    stopped: set[str] = field(default_factory=set)  # models whose further steps in this iteration are left out
    made: dict[str, int] = field(default_factory=dict)  # optimizer steps of models so far, less those left out
    before: Mapping[str, Any] = field(default_factory=dict)  # where it was drawn ahead: metrics of the iteration before
    responses: np.ndarray | None = None  # records of responses (response_hashes.py), once the rows are freed
    rounds: Rounds | None = None  # None: all rows are drawn once
    carried: Carried | None = None  # None: all responses end

    @classmethod
    def of_rows(
        cls,
        seed: int,
        number: int,
        prompt_MC: np.ndarray,
        store: Store,
        sample_MC: np.ndarray | None = None,
        **more: Any,
    ) -> "Iteration":
        """Returns rows on which nothing trains. sample_MC: None: each is the first sample of its prompt."""
        sample_MC = np.zeros_like(prompt_MC) if sample_MC is None else sample_MC
        source_EMC = torch.zeros((1, *prompt_MC.shape), dtype=torch.int64)
        return cls(number, seed, prompt_MC, sample_MC, source_EMC, store, **more)

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"{self.what} {self.number + self.first}"

    def again(self, place: Place, number: int) -> Tensor:
        """Returns which rows at a place a round samples, bool [M', C'].

        number: of the round; 0: the first, which samples all.
        """
        again_MC = self.rounds.again_MC if number and self.rounds else np.ones(self.prompt_MC.shape, bool)
        return torch.from_numpy(again_MC[place]).to(self.store.device)

    def note(self, name: str, place: Place, values: Sequence[float | None], rows_MC: Tensor) -> None:
        """Notes a number of some rows at a place; None: the row has none."""
        of_place_MC = self.noted.setdefault(name, np.full(self.prompt_MC.shape, np.nan))[place]
        of_place_MC[rows_MC.cpu().numpy()] = np.array(values, dtype=float)

    def random_bits(self, stream: int, columns: slice = ALL) -> Tensor:
        """Returns the random bits of the rows in some columns for each token that they may have, int64 [M, C', G]. They
        are made for a few rows at a time: the generator needs ten times the memory of its results.

        stream: the purpose of the tokens (random_streams.py).
        """
        prompt_B, sample_B = self.prompt_MC[:, columns].flatten(), self.sample_MC[:, columns].flatten()
        width, shape = self.store.workload.max_response, self.prompt_MC[:, columns].shape
        began_B = None if self.carried is None else self.carried.began_MC[:, columns].flatten()
        bits_BG, rows = np.empty((len(prompt_B), width), np.int64), max(1, NUMBERS_AT_ONCE // max(width, 1))
        for start in range(0, len(prompt_B), rows):
            part = slice(start, start + rows)
            number = self.number if began_B is None else began_B[part, None]
            bits_BG[part] = random_bits(self.seed, stream, number, prompt_B[part], sample_B[part], width)
        return torch.from_numpy(bits_BG).unflatten(0, shape).to(self.store.device)

    def bits_of(self, stream: int, columns: slice, row: int, sample: int) -> Tensor:
        """Returns the random bits [G] of a row in some columns, with those of a sample of its prompt.

        row: its number in [M, C'].
        stream, sample: of the numbers.
        """
        prompts, width = self.prompt_MC[:, columns].flatten()[[row]], self.store.workload.max_response
        bits_1G = random_bits(self.seed, stream, self.number, prompts, np.array([sample]), width)
        return torch.from_numpy(bits_1G[0])


def given_rows(
    workload: Workload,
    prompts: PromptSet,
    columns: Mapping[str, Sequence[range]],
    prompt_MC: np.ndarray,
    device: torch.device,
) -> Store:
    """Returns a store with this rank's rows of the data set.

    columns: that the rank holds of each key.
    prompt_MC: NO_ROW where a place has none.
    """
    store = Store(workload, columns, device)
    for key in workload.workflow.given:
        for held in columns.get(key, ()):
            part_MC = prompt_MC[:, held.start : held.stop]
            used_MC = part_MC != NO_ROW
            rows_B = torch.from_numpy(prompts.padded(key, part_MC[used_MC], workload.row_shape(key))).to(device)
            values_MC = store.at(key, (ALL, slice(held.start, held.stop)))
            values_MC[torch.from_numpy(used_MC).to(device)] = rows_B.to(values_MC.dtype)
    return store


def occurrences(prompt_N: np.ndarray) -> np.ndarray:
    """Counts, for each entry, the earlier entries with the same prompt: its sample index."""
    seen: Counter[int] = Counter()
    sample_N = np.empty_like(prompt_N)
    for row, prompt in enumerate(prompt_N.tolist()):
        sample_N[row] = seen[prompt]
        seen[prompt] += 1
    return sample_N
