"""The board on which every rank publishes its position, so that others can name it when it is late. It also decides
which rank reports a failure.

A rank that is blocked inside a torch collective cannot answer questions. Each rank therefore writes its position before
it enters one: into a slot of memory shared by the node's ranks (about a microsecond; readable even while the writer is
stopped) and, if the job spans nodes, also into the key-value store (without waiting for an answer).
"""

import fcntl
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.runtime.observe.flight_recorder import NOWHERE

SLOT_BYTES = 1024
LENGTH = struct.Struct("<i i i")  # of the text; iteration and position
LIFE = struct.Struct("<i ? d d")  # process, is waiting in a control message, time of the last activity and report
TEXT_AT = LENGTH.size + LIFE.size
STORE_ANSWER_S = 3.0
TURN_S = 2.0  # the first rank ends the job in less


def board_bytes(num_ranks: int) -> int:
    """Returns the size of the board of a node: the first slot holds the claim and what was said."""
    return SLOT_BYTES * (num_ranks + 1)


def take_claim(descriptor: int, memory: mmap.mmap) -> bool:
    """Returns whether no rank of this node has reported a failure yet; sets the first byte, which records this.
    `memory` maps the file: a write to it could fail, e.g. at a limit of file sizes."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    taken, memory[0] = memory[0], 1
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return not taken


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The status that a rank publishes. Times are seconds of the wall clock."""

    text: str = ""
    iteration: int = NOWHERE
    position: int = NOWHERE  # in its instruction list
    process: int = 0
    is_meeting: bool = False  # it waits in a control message
    active_s: float = 0.0  # time of its last activity
    reported_s: float = 0.0  # time of the last report by its watch


class Board:
    """The slots of the ranks `node_ranks`, mapped from the file `descriptor`, of board_bytes(len(node_ranks)). None:
    private memory for this rank only; the store shows it to others."""

    def __init__(self, descriptor: int | None, *, rank: int, node_ranks: tuple[int, ...], node: int, num_nodes: int):
        self.rank, self.num_nodes = rank, num_nodes
        self.shared = descriptor is not None
        self.store: Any = None  # set by start_torch, like a second connection for the watch's thread:
        self.second_store: Any = None  # a query to a store that does not answer blocks its connection
        self._query = threading.Thread()  # the last query to the second store
        seen = node_ranks if self.shared else (rank,)
        self.slots = {other: 1 + index for index, other in enumerate(seen)}
        self.descriptor, size = -1 if descriptor is None else descriptor, board_bytes(len(seen))
        self.memory = mmap.mmap(self.descriptor, size)
        self.turn = node if self.shared else rank
        self.post(b"", NOWHERE, NOWHERE)

    def post(self, where: bytes, iteration: int, position: int) -> None:
        """Publishes that this rank begins `where`, the instruction at `position` of its list."""
        text = where[: SLOT_BYTES - TEXT_AT]
        start = SLOT_BYTES * self.slots[self.rank]
        self.memory[start + TEXT_AT : start + TEXT_AT + len(text)] = text
        LENGTH.pack_into(self.memory, start, len(text), iteration, position)
        if self.store is not None:
            self.store.set(f"at/{self.rank}", self._slot(self.rank))

    def report(self, *, active_s: float, is_meeting: bool) -> None:
        """Publishes that this rank exists and was last active at `active_s` (wall clock)."""
        life_at = SLOT_BYTES * self.slots[self.rank] + LENGTH.size
        LIFE.pack_into(self.memory, life_at, os.getpid(), is_meeting, active_s, time.time())
        store = self.second_store  # which another thread takes away at the end of a run
        if store is not None and not self._query.is_alive():
            with suppress(RuntimeError):
                store.set(f"life/{self.rank}", self._slot(self.rank))

    def statuses(self, ranks: tuple[int, ...]) -> dict[int, RankStatus]:
        """Returns the status of these ranks at their last report, for the watch's thread; ranks without one are left
        out."""
        store = None if self._query.is_alive() else self.second_store
        return {rank: one for rank, one in self._read(ranks, store, "life").items() if one.process}

    def read(self, ranks: tuple[int, ...]) -> dict[int, RankStatus]:
        """Returns the last position of each rank, as it posted it; ranks that cannot be read are left out."""
        return self._read(ranks, self.store, "at")

    def _read(self, ranks: tuple[int, ...], store: Any, kind: str) -> dict[int, RankStatus]:
        """Returns statuses by rank: those of this node from the shared memory, the others from the store, if there is
        one."""
        statuses = {rank: _parse(self._slot(rank)) for rank in ranks if rank in self.slots}
        elsewhere = [rank for rank in ranks if rank not in statuses]
        if elsewhere and store is not None:
            stored = self._ask(lambda: self._from_store(store, elsewhere, kind), keep=kind == "life")
            if stored is None and 0 in elsewhere:
                stored = {0: RankStatus("nothing: its store does not answer")}
            statuses |= stored or {}
        return dict(sorted(statuses.items()))

    def claim(self) -> bool:
        """Returns True on the one rank that reports why the job ends: the first to ask on its node and, among those,
        the first to reach the store. If the store does not answer, the nodes take turns, TURN_S apart."""
        if self.shared and not take_claim(self.descriptor, self.memory):
            return False
        if self.num_nodes == 1 and self.shared:
            return True
        number = None if self.store is None else self._ask(lambda: self.store.add("claim", 1))
        if number is None:
            time.sleep(TURN_S * self.turn)
        return number in (None, 1)

    def first_to_say(self, text: str) -> bool:
        """Returns whether no rank of this node has said this text. After the claim, the first slot has its hashes."""
        said, number = memoryview(self.memory)[:SLOT_BYTES].cast("I"), zlib.crc32(text.encode(errors="replace")) or 1
        if self.shared:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        try:
            known = said[1:].tolist()
            if number not in known and 0 in known:
                said[1 + known.index(0)] = number
            return number not in known
        finally:
            if self.shared:
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def _slot(self, rank: int) -> bytes:
        start = SLOT_BYTES * self.slots[rank]
        length, _, _ = LENGTH.unpack_from(self.memory, start)
        return self.memory[start : start + TEXT_AT + length]

    def _from_store(self, store: Any, ranks: list[int], kind: str) -> dict[int, RankStatus]:
        stored = [rank for rank in ranks if store.check([f"{kind}/{rank}"])]
        return {rank: _parse(store.get(f"{kind}/{rank}")) if rank in stored else RankStatus() for rank in ranks}

    def _ask(self, query: Callable[[], Any], *, keep: bool = False) -> Any:
        """Queries the store in a separate thread: while rank 0 is stopped, its store does not answer (None)."""
        answers: list[Any] = []

        def ask() -> None:
            with suppress(RuntimeError):  # the store is gone
                answers.append(query())

        thread = threading.Thread(target=ask, daemon=True)
        if keep:
            self._query = thread
        thread.start()
        thread.join(STORE_ANSWER_S)
        return answers[0] if answers else None


def _parse(slot: bytes) -> RankStatus:
    length, iteration, position = LENGTH.unpack_from(slot, 0)
    text = slot[TEXT_AT : TEXT_AT + length].decode(errors="replace")
    return RankStatus(text, iteration, position, *LIFE.unpack_from(slot, LENGTH.size))
