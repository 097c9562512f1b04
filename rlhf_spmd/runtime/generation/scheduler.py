"""The scheduler of continuous batching: assigns rows of the batch and blocks of the KV cache to requests. No tensors.

Requests wait in a queue. `admit` gives the first ones a row of the batch and blocks for their tokens as soon as both
are free. `grow` allocates a block for every row whose next token needs one; if none is free, it puts the youngest rows
back into the queue (vLLM's preemption by recomputation, arXiv 2309.06180, section 4.5). `remove` frees finished rows.
Requests with the same prompt share the blocks that the prompt fills (section 4.4). A row that waits for an answer
between two turns is *outside*: it keeps its blocks, unless a row of the batch needs them.

If a block holds the longest sequence, every row has one block and row i uses block i; a batch is then a slice of the
cache, which a CPU reads fastest. Rows outside have the last blocks. All ranks of one copy of the model run the same
scheduler.

Where prompts have a pass of their own (decoder.py), whose kernels the host launches one by one, `batches_admissions`
makes a free row wait for others: until an eighth of the rows have left, or for 32 steps, after which the rows that stay
empty would cost more than the pass.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

Copies = list[tuple[int, int]]  # blocks (from, to)
Moves = list[tuple[int, int, int]]  # the same with a number of tokens

ADMISSION_SHARE = 8  # of so many rows one leaves before the next are admitted
ADMISSION_STEPS = 32  # or so many steps go by


class Blocks:
    """Blocks of `size` tokens, with the number of rows that use each."""

    def __init__(self, num_blocks: int, size: int):
        self.num_blocks, self.size = num_blocks, size
        self._free = list(range(num_blocks))  # a heap: the lowest is taken first
        self._uses = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def needed(self, num_tokens: int) -> int:
        """Returns the number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.size)

    def take(self, count: int) -> list[int]:
        """Allocates the lowest free blocks."""
        taken = [heapq.heappop(self._free) for _ in range(count)]
        for block in taken:
            self._uses[block] = 1
        return taken

    def take_last(self) -> int:
        """Allocates the highest free block."""
        self._free.sort()  # which is a heap
        block = self._free.pop()
        self._uses[block] = 1
        return block

    def share(self, blocks: Sequence[int]) -> None:
        """Notes that one more row uses these blocks."""
        for block in blocks:
            assert self._uses[block] > 0, block
            self._uses[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """Notes that one row fewer uses these blocks."""
        for block in blocks:
            assert self._uses[block] > 0, block
            self._uses[block] -= 1
            if self._uses[block] == 0:
                heapq.heappush(self._free, block)


@dataclass(slots=True)
class Row:
    """A request: in the queue, in a row of the batch, or outside.

    key: identifies its prompt; requests with the same prompt have the same key.
    num_prompt: prompt tokens.
    base: tokens in the cache when it joins the batch, or outside: of the prompt, and of the response so far.
    blocks: none in the queue, nor of a row outside that was preempted.
    joined: number of decode steps before it joined the batch.
    """

    request: int
    key: int
    num_prompt: int
    base: int
    blocks: list[int] = field(default_factory=list)
    joined: int = 0


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that gets the next row.

    donor: index of a row with the same prompt, already in the cache or admitted in this round; None: prefill.
    copy: (from, to) for the donor's last, partly filled block.
    """

    row: Row
    donor: int | None
    copy: tuple[int, int] | None


@dataclass(slots=True)
class Scheduler:
    """The queue and the batch.

    max_rows: limit of sequences decoded at the same time.
    prefill_tokens: limit of tokens in one prefill.
    blocks_per_row: limit of blocks per row (0: none).

    tables_BM holds the blocks of `rows` (int32; entries beyond a row's blocks are undefined). It is updated in place
    and never rebuilt: a batch of 256 rows gets about twenty new blocks per step.
    """

    blocks: Blocks
    max_rows: int
    prefill_tokens: int
    blocks_per_row: int = 0
    waiting: deque[Row] = field(default_factory=deque)
    rows: list[Row] = field(default_factory=list)
    outside: dict[int, Row] = field(default_factory=dict)  # by request
    moves: list[Moves] = field(default_factory=list)  # to do before the next pass, in order; the engine empties it
    one_block: bool = False  # row i has exactly one block, block i
    batches_admissions: bool = False  # admits several requests at a time
    opens_rows: bool = False  # rows outside may wait for others that are in the queue
    tables_BM: np.ndarray = field(init=False)
    has_new_tables: bool = True  # the reader of the tables resets it
    _steps: int = 0  # decode steps so far
    _next_full: int = 0  # no row needs a block before this step
    _admitted: int = 0  # the step of the last admission
    _num_left: int = 0  # rows that have left since
    _is_open: bool = True  # whoever comes need not wait for others

    def __post_init__(self):
        self.tables_BM = np.zeros((self.max_rows, self.blocks_per_row or self.blocks.num_blocks), dtype=np.int32)

    def num_cached(self, row: Row) -> int:
        """Returns the number of a row's tokens in the cache."""
        return row.base + self._steps - row.joined

    def admit(self) -> list[Admission]:
        """Moves requests from the queue to `rows` while there are free rows and blocks."""
        admitted: list[Admission] = []
        tokens = 0
        if (
            self.batches_admissions
            and self.waiting
            and not self._is_open
            and ADMISSION_SHARE * self._num_left < len(self.rows)
            and self._steps - self._admitted < ADMISSION_STEPS
        ):
            return admitted
        self._is_open = not self.waiting
        while self.opens_rows and self.waiting and not self.rows and not self._fits(self.waiting[0]):
            self._preempt_outside()  # it may wait for an answer to the one that waits
        while self.waiting and len(self.rows) + self._num_outside < self.max_rows:
            row = self.waiting[0]
            donor = self._donor(row)
            shared = self.rows[donor].blocks[: row.num_prompt // self.blocks.size] if donor is not None else []
            fresh = self.blocks.needed(row.base) - len(shared)
            spare = 1 if self.rows and not self.one_block else 0  # else the new row would be preempted at once
            if fresh + spare > self.blocks.num_free:
                break
            if donor is None and admitted and tokens + row.base > self.prefill_tokens:
                self._is_open = True  # the rest follows at once
                break
            tokens += row.base if donor is None else 0
            self.waiting.popleft()
            self.blocks.share(shared)
            if self.outside and self.one_block:
                self._clear(len(self.rows))
            row.blocks, row.joined = shared + self.blocks.take(fresh), self._steps
            copy = None
            if donor is not None and row.num_prompt % self.blocks.size:
                copy = (self.rows[donor].blocks[len(shared)], row.blocks[len(shared)])
            self._join(row)
            admitted.append(Admission(row, donor, copy))
        if admitted:
            self._next_full, self._admitted, self._num_left = 0, self._steps, 0
        return admitted

    @property
    def _num_outside(self) -> int:
        """How many rows outside have blocks."""
        return sum(bool(row.blocks) for row in self.outside.values())

    def _fits(self, row: Row) -> bool:
        """Returns whether a request has room in an empty batch beside the rows outside, as it has if none has
        blocks."""
        num = self._num_outside
        return not num or (num < self.max_rows and self.blocks.needed(row.base) <= self.blocks.num_free)

    def _clear(self, index: int) -> None:
        """Frees, with one block for each row, the block of the next row of the batch if a row outside has it."""
        for row in self.outside.values():
            if row.blocks == [index]:
                row.blocks = [self.blocks.take_last()]
                self.blocks.drop([index])
                self.moves.append([(index, row.blocks[0], row.base)])

    def resume(self, request: int, num_new: int) -> Row | None:
        """Gives a row outside num_new more tokens and makes it the last of the batch. Returns None if no blocks are
        free for them: then it is the first of the queue, and all its tokens will be prefilled again.
        """
        row = self.outside.pop(request)
        cached, row.base = row.base, row.base + num_new
        fresh = self.blocks.needed(row.base) - len(row.blocks)
        if not row.blocks or fresh + bool(self.rows and not self.one_block) > self.blocks.num_free:
            self._queue(row)
            return None
        if self.one_block:
            source, to = row.blocks[0], len(self.rows)
            other = next((outside for outside in self.outside.values() if outside.blocks == [to]), None)
            if other is not None:
                other.blocks, row.blocks = row.blocks, other.blocks
                self.moves.append([(source, to, cached), (to, source, other.base)])
            elif source != to:
                self.blocks.drop(row.blocks)
                row.blocks = self.blocks.take(1)
                self.moves.append([(source, to, cached)])
        row.blocks += self.blocks.take(fresh)
        row.joined, self._next_full, self._is_open = self._steps, 0, True  # its tokens are such a pass
        self._join(row)
        return row

    def finish(self, request: int) -> None:
        """Removes a row outside, whose episode is over."""
        self.blocks.drop(self.outside.pop(request).blocks)

    def _queue(self, row: Row) -> None:
        """Frees the blocks of a row, and makes it the first of the queue."""
        self.blocks.drop(row.blocks)
        row.blocks = []
        self.waiting.appendleft(row)

    def _join(self, row: Row) -> None:
        """Makes a row the last of the batch."""
        self._put(len(self.rows), 0, row.blocks)
        self.rows.append(row)

    def _put(self, index: int, place: int, blocks: Sequence[int]) -> None:
        """Writes blocks into a row's table, starting at `place`."""
        self.tables_BM[index, place : place + len(blocks)] = blocks
        self.has_new_tables = True

    def _donor(self, head: Row) -> int | None:
        """Returns the first row that was prefilled with exactly this request's prompt; None if it has drawn tokens
        already."""
        if head.base > head.num_prompt:
            return None
        fits = (i for i, row in enumerate(self.rows) if row.key == head.key and row.base == row.num_prompt)
        return next(fits, None)

    def grow(self) -> list[int]:
        """Allocates blocks for the next token of every row; call it before each decode step. Returns the preempted
        requests, which were the last rows and are now the first in the queue."""
        preempted: list[int] = []
        if self._steps >= self._next_full:
            index = 0
            while index < len(self.rows):
                row = self.rows[index]
                if self._room(row) == 0:
                    if self.blocks.num_free == 0 and self._preempt_outside():
                        continue
                    if self.blocks.num_free == 0:
                        preempted.append(self._preempt())
                        continue  # retry this row, unless it was the preempted one
                    taken = self.blocks.take(1)
                    self._put(index, len(row.blocks), taken)
                    row.blocks += taken
                index += 1
            self._next_full = self._steps + min((self._room(row) for row in self.rows), default=0)
        self._steps += 1
        return preempted

    @property
    def has_room(self) -> bool:
        """Whether the next step preempts no row."""
        return self.one_block or self._steps < self._next_full or len(self.rows) <= self.blocks.num_free

    def _room(self, row: Row) -> int:
        """Returns the number of further tokens that the row's blocks can hold."""
        return len(row.blocks) * self.blocks.size - self.num_cached(row)

    def _preempt(self) -> int:
        """Moves the last row to the head of the queue; its prompt and drawn tokens will be prefilled again."""
        row = self.rows.pop()
        row.base = self.num_cached(row) + 1  # the cached tokens, plus the one that this step would have stored
        self._queue(row)
        return row.request

    def _preempt_outside(self) -> bool:
        """Takes the blocks of the row that has been outside for the shortest time; False if there is none."""
        row = next((row for row in reversed(self.outside.values()) if row.blocks), None)
        if row is not None:
            self.blocks.drop(row.blocks)
            row.blocks = []
        return row is not None

    def remove(self, ended: Sequence[int], outside: Sequence[int] = ()) -> tuple[list[int], Moves]:
        """Removes rows -> (the old index of each remaining row, what moves). ended, outside: indices, ascending;
        the latter wait for an answer."""
        leaving = [self.rows[index] for index in outside]
        for row in leaving:
            row.base = self.num_cached(row)
        for index in (*ended, *(outside if self.one_block else ())):
            self.blocks.drop(self.rows[index].blocks)
        gone = {*ended, *outside}
        num_left = len(self.rows) - len(gone)
        order = [index for index in range(len(self.rows)) if index not in gone]
        moves: Moves = []
        if self.one_block:  # the last rows fill the gaps
            moved = [index for index in order if index >= num_left]
            order = [index if index not in gone else moved.pop() for index in range(num_left)]
            moves = [(one, to, self.num_cached(self.rows[one])) for to, one in enumerate(order) if one != to]
            for source, _, _ in moves:
                self.blocks.drop([source])
                self.rows[source].blocks = self.blocks.take(1)  # the lowest, which is the gap
            for row in leaving:
                (source,), row.blocks = row.blocks, [self.blocks.take_last()]
                moves[:0] = [(source, row.blocks[0], row.base)] if row.blocks != [source] else []
        self.outside |= {row.request: row for row in leaving}
        self.rows = [self.rows[index] for index in order]
        if not self.one_block:  # there row i keeps block i
            self.tables_BM[:num_left] = self.tables_BM[order]
            self.has_new_tables = True
        self._next_full = 0
        self._num_left += len(gone)
        return order, moves
