"""Who sits in which place of a batch, and in which blocks of the KV cache: continuous batching as pure bookkeeping.

Requests wait in line. `admit` gives the first of them a row of the batch and blocks for their tokens as soon as both
are free; `grow` finds a block for every row whose next token needs one, and puts the youngest rows back in line when
there is none (vLLM's preemption by recomputation, arXiv 2309.06180, section 4.5); `remove` takes out those that have
ended. Requests of one prompt share the blocks that their prompt fills (section 4.4).

Where a block holds the longest sequence there is one block per row, and row i is kept in block i: then a batch is a
plain slice of the cache, which is what a CPU reads fastest. Ranks that decode together do the same bookkeeping.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

Copies = list[tuple[int, int]]  # blocks (from, to)


class Blocks:
    """Blocks of `size` tokens with a count of the rows that use each."""

    def __init__(self, num_blocks: int, size: int):
        assert num_blocks > 0 and size > 0, (num_blocks, size)
        self.num_blocks, self.size = num_blocks, size
        self._free = list(range(num_blocks))  # a heap: the lowest is taken first
        self._uses = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def needed(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.size)

    def take(self, count: int) -> list[int]:
        """The lowest free blocks."""
        assert count <= self.num_free, (count, self.num_free)
        taken = [heapq.heappop(self._free) for _ in range(count)]
        for block in taken:
            self._uses[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more row uses these."""
        for block in blocks:
            assert self._uses[block] > 0, block
            self._uses[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """One row fewer uses these."""
        for block in blocks:
            assert self._uses[block] > 0, block
            self._uses[block] -= 1
            if self._uses[block] == 0:
                heapq.heappush(self._free, block)


@dataclass(slots=True)
class Row:
    """A request under way. key: its prompt's; requests of one key have the same prompt."""

    request: int
    key: int
    num_prompt: int  # tokens that it shares with its key
    blocks: list[int]
    base: int  # tokens in the cache when it joined
    joined: int  # number of decode steps before that


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in line. num_tokens: of the prompt and of what had been drawn before it was preempted."""

    request: int
    key: int
    num_prompt: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that gets the next row. donor: a row whose prompt is in the cache already (an index, perhaps of this
    round), None: prefill it. copy: what to copy of the donor's last, partly filled block."""

    waiting: Waiting
    row: Row
    donor: int | None
    copy: tuple[int, int] | None


@dataclass(slots=True)
class Scheduler:
    """The line and the batch. max_rows: sequences decoded at the same time; prefill_tokens: most in one prefill;
    blocks_per_row: most that a row may get (0: all).

    tables_BM holds the blocks of `rows` (int32, one row each; what is beyond a row's blocks means nothing). It is
    written where blocks come and go, and never built anew: a batch of 256 rows gets some twenty blocks a step.
    """

    blocks: Blocks
    max_rows: int
    prefill_tokens: int
    blocks_per_row: int = 0
    waiting: deque[Waiting] = field(default_factory=deque)
    rows: list[Row] = field(default_factory=list)
    one_block: bool = False  # every row has one block, of its own number
    tables_BM: np.ndarray = field(init=False)
    has_new_tables: bool = True  # whoever copies the tables sets it to False
    _steps: int = 0  # decode steps so far
    _next_full: int = 0  # no row needs a block before this step

    def __post_init__(self):
        self.tables_BM = np.zeros((self.max_rows, self.blocks_per_row or self.blocks.num_blocks), dtype=np.int32)

    def submit(self, requests: Iterable[Waiting]) -> None:
        """Puts requests at the end of the line."""
        self.waiting.extend(requests)

    def num_cached(self, row: Row) -> int:
        """Tokens of a row in the cache."""
        return row.base + self._steps - row.joined

    def admit(self) -> list[Admission]:
        """Rows for the head of the line, as many as there are places and blocks for; appended to `rows`."""
        admitted: list[Admission] = []
        tokens = 0
        while self.waiting and len(self.rows) < self.max_rows:
            head = self.waiting[0]
            donor = self._donor(head)
            shared = self.rows[donor].blocks[: head.num_prompt // self.blocks.size] if donor is not None else []
            fresh = self.blocks.needed(head.num_tokens) - len(shared)
            spare = 1 if self.rows and not self.one_block else 0  # or the newcomer would be preempted at once
            if fresh + spare > self.blocks.num_free:
                break
            if donor is None and admitted and tokens + head.num_tokens > self.prefill_tokens:
                break
            tokens += head.num_tokens if donor is None else 0
            self.waiting.popleft()
            self.blocks.share(shared)
            row = Row(
                head.request, head.key, head.num_prompt, shared + self.blocks.take(fresh), head.num_tokens, self._steps
            )
            assert not self.one_block or row.blocks == [len(self.rows)], row
            copy = None
            if donor is not None and head.num_prompt % self.blocks.size:
                copy = (self.rows[donor].blocks[len(shared)], row.blocks[len(shared)])
            self._put(len(self.rows), 0, row.blocks)
            self.rows.append(row)
            admitted.append(Admission(head, row, donor, copy))
        if admitted:
            self._next_full = 0
        return admitted

    def _put(self, index: int, place: int, blocks: Sequence[int]) -> None:
        """Blocks of a row in its table, from this place on."""
        self.tables_BM[index, place : place + len(blocks)] = blocks
        self.has_new_tables = True

    def _donor(self, head: Waiting) -> int | None:
        """The first row whose prefill was just the prompt of a request that has drawn nothing yet."""
        if head.num_tokens > head.num_prompt:
            return None
        fits = (i for i, row in enumerate(self.rows) if row.key == head.key and row.base == row.num_prompt)
        return next(fits, None)

    def grow(self) -> list[int]:
        """Blocks for the next token of every row; call it before each decode step. Returns the requests that had to
        leave, which were the last rows; they are in line again, first."""
        preempted: list[int] = []
        if self._steps >= self._next_full:
            index = 0
            while index < len(self.rows):
                row = self.rows[index]
                if self._is_full(row):
                    if self.blocks.num_free == 0:
                        preempted.append(self._preempt())
                        continue  # this row again, unless it was the one that left
                    taken = self.blocks.take(1)
                    self._put(index, len(row.blocks), taken)
                    row.blocks += taken
                index += 1
            self._next_full = self._steps + min((self._room(row) for row in self.rows), default=0)
        self._steps += 1
        return preempted

    def _room(self, row: Row) -> int:
        """Tokens that its blocks still take."""
        return len(row.blocks) * self.blocks.size - self.num_cached(row)

    def _is_full(self, row: Row) -> bool:
        return self._room(row) == 0

    def _preempt(self) -> int:
        """Puts the last row at the head of the line; it will be prefilled with what it has drawn so far."""
        row = self.rows.pop()
        self.blocks.drop(row.blocks)
        # all that is in the cache, and the token that this step would have put there
        self.waiting.appendleft(Waiting(row.request, row.key, row.num_prompt, self.num_cached(row) + 1))
        return row.request

    def remove(self, ended: Sequence[int]) -> tuple[list[int], Copies]:
        """Takes rows out -> (the old index of each row that is left, blocks to copy). ended: indices, ascending."""
        for index in ended:
            self.blocks.drop(self.rows[index].blocks)
        gone, num_left = set(ended), len(self.rows) - len(ended)
        order = [index for index in range(len(self.rows)) if index not in gone]
        copies: Copies = []
        if self.one_block:  # the last rows fill the holes
            moved = [index for index in order if index >= num_left]
            order = [index if index not in gone else moved.pop() for index in range(num_left)]
            copies = [(source, to) for to, source in enumerate(order) if source != to]
            for source, to in copies:
                self.blocks.drop([source])
                assert self.blocks.take(1) == [to], (source, to)
                self.rows[source].blocks = [to]
        self.rows = [self.rows[index] for index in order]
        if not self.one_block:  # where row i keeps block i
            self.tables_BM[:num_left] = self.tables_BM[order]
            self.has_new_tables = True
        self._next_full = 0
        return order, copies
