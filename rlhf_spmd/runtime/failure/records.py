"""The record of a rank: its position and its last few hundred actions, in memory that outlives the rank.

The memory has three readers. The rank's supervisor (supervise.py) copies it into the run folder twice a second and once
more at the end, so the rank never waits for a disk, a full disk does not affect it, and its last action is known
however it ended. The ranks of the same node map it, to name a rank that is late: a rank that is blocked inside a torch
collective cannot answer questions. If the job spans nodes, positions are also written to the key-value store, without
waiting for an answer. The record of the first rank of a node also decides which rank reports a failure. Recording an
action costs about two microseconds. No torch, no MPI.
"""

import ctypes
import fcntl
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.printing import printable
from rlhf_spmd.files.reading import paths_in, read_bytes

FOLDER = "flight"  # in the run folder
MESSAGE = "failure.txt"
NUM_ACTIONS = 512
NOWHERE = -1  # position of an action that is not an instruction
MAGIC = b"rlhf-fl2"
TEXT_BYTES, ACTION_BYTES, HOST_BYTES, PATH_BYTES = 512, 96, 64, 4096  # no path is longer
LAST_S = 253_402_300_799.0  # the last second that a calendar has
DONE, UNDONE = 1, 2  # Record.left: whether the status of the rank's work is known; 0: it has not left
STORE_ANSWER_S = 3.0
TURN_S = 2.0  # the first rank ends the job in less

SHARED_MEMORY = "/dev/shm"
COMPILED = "compiled"  # the folder of what torch compiles


@cache
def prefix() -> str:
    """Returns how the names of files begin that a rank has outside the run folder. Its supervisor, which removes them,
    asks first, before it forks."""
    return f"rlhf_spmd_{os.urandom(16).hex()}_"


class _Texted(ctypes.Structure):
    """A structure with the field _text, in UTF-8."""

    @property
    def text(self) -> str:
        return self._text.decode(errors="replace")


class Action(_Texted):
    """One action of a rank. Times are seconds of the wall clock; end_s is 0 while it runs."""

    _fields_ = [
        ("iteration", ctypes.c_int32),
        ("position", ctypes.c_int32),  # in the rank's instruction list, or NOWHERE
        ("begin_s", ctypes.c_double),
        ("end_s", ctypes.c_double),
        ("_text", ctypes.c_char * ACTION_BYTES),
    ]


class Position(_Texted):
    """What a rank does now, as other ranks see it. Times are seconds of the wall clock."""

    _fields_ = [
        ("iteration", ctypes.c_int32),
        ("position", ctypes.c_int32),  # as in Action
        ("process", ctypes.c_int32),  # 0: its watch has not reported yet
        ("is_meeting", ctypes.c_bool),  # it waits in a control message
        ("sequence", ctypes.c_int64),  # the number of its control messages
        ("since_s", ctypes.c_double),  # when the current action began
        ("active_s", ctypes.c_double),  # its last activity
        ("reported_s", ctypes.c_double),  # the last report by its watch
        ("_text", ctypes.c_char * TEXT_BYTES),
    ]

    @classmethod
    def of(cls, text: str = "", iteration: int = NOWHERE, position: int = NOWHERE) -> "Position":
        """Returns the position of a rank that has not reported."""
        return cls(iteration, position, _text=text.encode())


class Record(ctypes.Structure):
    """The record of one rank; the layout of the memory and of the file in the run folder."""

    _fields_ = [
        ("magic", ctypes.c_char * len(MAGIC)),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("process", ctypes.c_int32),
        ("descriptor", ctypes.c_int32),  # of this memory, in the rank's process
        ("first_process", ctypes.c_int32),  # the first rank of the node, once it is known
        ("first_descriptor", ctypes.c_int32),
        ("num_instructions", ctypes.c_int32),  # of the rank's list, once it is known
        ("is_claimed", ctypes.c_bool),  # of the first rank of a node: one of them has reported a failure
        ("_host", ctypes.c_char * HOST_BYTES),
        ("_run", ctypes.c_char * PATH_BYTES),
        ("now", Position),
        ("device_bytes", ctypes.c_int64),
        # written by the supervisor
        ("beat_s", ctypes.c_double),  # its last heartbeat
        ("processor_s", ctypes.c_double),
        ("memory_bytes", ctypes.c_int64),
        ("most_memory_bytes", ctypes.c_int64),
        ("_state", ctypes.c_char * 16),
        ("end_s", ctypes.c_double),  # when the rank ended; 0 while it runs
        ("signal", ctypes.c_int32),
        # written by both
        ("status", ctypes.c_int32),
        ("left", ctypes.c_int32),
        ("num_begun", ctypes.c_int64),
        ("actions", Action * NUM_ACTIONS),  # a ring
    ]

    lock: int  # a descriptor of the memory, of this process
    num_begun: int
    is_claimed: bool

    @classmethod
    def create(cls) -> "Record":
        """Returns the record of this process in new memory, which processes forked from it share."""
        descriptor = os.memfd_create("rlhf_spmd_record")
        os.posix_fallocate(descriptor, 0, ctypes.sizeof(cls))  # or a write would end in SIGBUS where memory is short
        record = cls.from_buffer(mmap.mmap(descriptor, ctypes.sizeof(cls)))
        record.magic, record.descriptor, record.size = MAGIC, descriptor, 1
        record.now, record.lock = Position.of(), descriptor
        record.describe()
        return record

    @classmethod
    def of_process(cls, process: int, descriptor: int) -> "Record | None":
        """Maps the record of another process of this node; None if this process does not see it."""
        with suppress(OSError, ValueError):
            lock = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
            record = cls.from_buffer(mmap.mmap(lock, ctypes.sizeof(cls)))
            record.lock = lock
            return record
        return None

    @classmethod
    def parse(cls, data: bytes) -> "Record | None":
        """Reads the file of a record; None if it is not one, or has times that no clock shows. A text may be torn if
        the rank was writing it."""
        if len(data) != ctypes.sizeof(cls):
            return None
        record = cls.from_buffer_copy(data)
        is_whole = record.magic == MAGIC and record.rank >= 0 and record.num_begun >= 0
        return record if is_whole and _are_times(record.now.since_s, record.beat_s, record.end_s) else None

    host = property(lambda self: self._host.decode(errors="replace"))
    run = property(lambda self: os.fsdecode(self._run), doc="The run folder, once it is known.")
    state = property(lambda self: self._state.decode(errors="replace"), doc="The state of the process, of psutil.")

    def describe(self, *, host: str = "", folder: str = "", **numbers: int) -> None:
        """Sets facts of this rank, by their names. With `folder`, the absolute path of the run folder, the supervisor
        also writes the record there."""
        path = os.fsencode(folder)
        if len(path) >= PATH_BYTES:
            text = f"the path of the run folder has {PATH_BYTES:,} bytes or more; give a shorter one (--runs)"
            raise UserError(text)
        self.process = os.getpid()
        if host:
            self._host = os.fsencode(host)[: HOST_BYTES - 1]
        if folder:
            self._run = path
        for name, number in numbers.items():
            setattr(self, name, number)

    def begin(self, text: str, iteration: int = NOWHERE, position: int = NOWHERE) -> None:
        """Records that this rank ends its current action and begins another."""
        begin_s, encoded, number = time.time(), text.encode(errors="replace"), self.num_begun
        if number:
            self.actions[(number - 1) % NUM_ACTIONS].end_s = begin_s
        action, now = self.actions[number % NUM_ACTIONS], self.now
        action.iteration, action.position, action.begin_s, action.end_s = iteration, position, begin_s, 0.0
        action._text = encoded[: ACTION_BYTES - 1]
        now.iteration, now.position, now.since_s, now._text = iteration, position, begin_s, encoded[: TEXT_BYTES - 1]
        self.num_begun = number + 1

    def last_actions(self) -> list[Action]:
        """Returns the recorded actions, the oldest first."""
        numbers = range(max(0, self.num_begun - NUM_ACTIONS), self.num_begun)
        actions = [self.actions[number % NUM_ACTIONS] for number in numbers]
        return [action for action in actions if _are_times(action.begin_s, action.end_s)]

    @property
    def where(self) -> str:
        """For messages: `iteration 3: Run actor_train with ranks 0-3 (instruction 7 of 12)`."""
        of = f" of {self.num_instructions}" if self.num_instructions else ""
        return self.now.text + (f" (instruction {self.now.position}{of})" if self.now.position != NOWHERE else "")

    def leave(self, status: int = 0) -> None:
        """Marks the following exit as intended: any error has been reported, or will be. The rank's work has this
        status, whatever that of its process."""
        self.status, self.left = status, DONE

    def leave_undone(self) -> None:
        """Marks the following exit as intended, unless the status of the work is known; that of the process counts."""
        if self.left != DONE:
            self.status, self.left = 1, UNDONE  # the status if something keeps the rank

    def keep(self) -> None:
        """Copies this record into the run folder, once that is known; errors of the disk are ignored."""
        if not self._run:
            return
        path = file_of(self.run, self.rank)
        with suppress(OSError):
            path.parent.mkdir(mode=0o750, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640)
            try:
                os.pwrite(descriptor, self, 0)
            finally:
                os.close(descriptor)  # makes it visible to other hosts

    def claim(self) -> bool:
        """Returns whether no rank of this node has reported a failure yet, and records that one has. Of the record of
        the node's first rank."""
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        is_first = not self.is_claimed
        self.is_claimed = True
        fcntl.flock(self.lock, fcntl.LOCK_UN)
        return is_first


def _are_times(*seconds: float) -> bool:
    return all(0.0 <= value <= LAST_S for value in seconds)


class Positions:
    """The positions of all ranks: those of this node from their records, others from the key-value store."""

    def __init__(self, record: Record, of_node: Mapping[int, Record] | None, *, node: int, num_nodes: int):
        """of_node: the records of the ranks of this node; None: this rank does not see them, and the store shows its
        own to others."""
        self.record, self.num_nodes, self.shared = record, num_nodes, of_node is not None
        self.of_node = {record.rank: record} if of_node is None else of_node
        self.turn = node if self.shared else record.rank
        self.store: Any = None  # set by start_torch, like a second connection for the watch's thread:
        self.second_store: Any = None  # a query to a store that does not answer blocks its connection
        self._query = threading.Thread()  # the last query to the second store

    def post(self) -> None:
        """Publishes the position of this rank to other nodes."""
        if self.store is not None:
            self.store.set(f"at/{self.record.rank}", bytes(self.record.now))

    def report(self, *, active_s: float, is_meeting: bool) -> None:
        """Publishes that this rank exists and was last active at `active_s` (wall clock). Called by the watch."""
        now = self.record.now
        now.process, now.is_meeting, now.active_s, now.reported_s = os.getpid(), is_meeting, active_s, time.time()
        store = self.second_store  # which another thread takes away at the end of a run
        if store is not None and not self._query.is_alive():
            with suppress(RuntimeError):
                store.set(f"at/{self.record.rank}", bytes(now))

    def reported(self, ranks: tuple[int, ...]) -> dict[int, Position]:
        """Returns the positions of those of these ranks whose watches have reported. Called by the watch."""
        store = None if self._query.is_alive() else self.second_store
        return {rank: position for rank, position in self._read(ranks, store).items() if position.process}

    def read(self, ranks: tuple[int, ...]) -> dict[int, Position]:
        """Returns the last position of each rank; ranks that cannot be read are left out."""
        return self._read(ranks, self.store)

    def _read(self, ranks: tuple[int, ...], store: Any) -> dict[int, Position]:
        positions = {rank: Position.from_buffer_copy(self.of_node[rank].now) for rank in ranks if rank in self.of_node}
        elsewhere = [rank for rank in ranks if rank not in positions]
        if elsewhere and store is not None:
            stored = self._ask(lambda: _from_store(store, elsewhere), is_second=store is self.second_store)
            if stored is None and 0 in elsewhere:
                stored = {0: Position.of("nothing: its store does not answer")}
            positions |= stored or {}
        return dict(sorted(positions.items()))

    def claim(self) -> bool:
        """Returns True on the one rank that reports why the job ends: the first to ask on its node and, among those,
        the first to reach the store. If the store does not answer, the nodes take turns, TURN_S apart."""
        if self.shared and not self.of_node[min(self.of_node)].claim():
            return False
        if self.num_nodes == 1 and self.shared:
            return True
        number = None if self.store is None else self._ask(lambda: self.store.add("claim", 1))
        if number is None:
            time.sleep(TURN_S * self.turn)
        return number in (None, 1)

    def _ask(self, query: Callable[[], Any], *, is_second: bool = False) -> Any:
        """Queries the store in a separate thread: while rank 0 is stopped, its store does not answer (None)."""
        answers: list[Any] = []

        def ask() -> None:
            with suppress(RuntimeError):  # the store is gone
                answers.append(query())

        thread = threading.Thread(target=ask, daemon=True)
        if is_second:
            self._query = thread
        thread.start()
        thread.join(STORE_ANSWER_S)
        return answers[0] if answers else None


def _from_store(store: Any, ranks: list[int]) -> dict[int, Position]:
    keys = {rank: f"at/{rank}" for rank in ranks}
    stored = {rank: store.get(key) for rank, key in keys.items() if store.check([key])}
    return {rank: Position.from_buffer_copy(stored[rank]) if rank in stored else Position.of() for rank in ranks}


def file_of(folder: str | Path, rank: int) -> Path:
    """Returns the file of a rank's record."""
    return Path(folder) / FOLDER / f"rank-{rank:04d}.bin"


def read_records(folder: str | Path) -> list[Record]:
    """Returns the records of a run folder, by rank; files that are not records are left out. Raises OSError and
    UserError for what can't be read."""
    records = []
    for path in paths_in(Path(folder) / FOLDER, "rank-*.bin"):
        with suppress(FileNotFoundError):
            records.append(Record.parse(read_bytes(path)))
    return [record for record in records if record is not None]


def keep_message(folder: str, text: str) -> None:
    """Stores the error message of a failed job for a postmortem; only the first one is kept."""
    path = Path(folder) / FOLDER / MESSAGE
    if folder and not path.exists():
        with suppress(OSError), path.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(printable(text) + "\n")


def read_message(folder: str | Path) -> str | None:
    """Returns the error message of a failed job; None if there is none. Raises OSError if it can't be read."""
    try:
        return read_bytes(Path(folder) / FOLDER / MESSAGE).decode(errors="replace").rstrip() or None
    except FileNotFoundError:
        return None


def forget(folder: str | Path, num_ranks: int) -> None:
    """Removes files of an earlier part of this run that a new part with `num_ranks` ranks will not overwrite."""
    (Path(folder) / FOLDER / MESSAGE).unlink(missing_ok=True)
    kept = {file_of(folder, rank) for rank in range(num_ranks)}
    for path in (Path(folder) / FOLDER).glob("rank-*.bin"):
        if path not in kept:
            path.unlink()


def remove_node_files(ending: str = "") -> None:
    """Removes the files and folders outside the run folder that this rank has left, or those with this ending."""
    for folder in (SHARED_MEMORY, tempfile.gettempdir()):
        for path in Path(folder).glob(f"{prefix()}*{ending}"):
            shutil.rmtree(path, ignore_errors=True)
            with suppress(OSError):
                path.unlink()


def keep_compiled() -> None:
    """Lets torch keep what it compiles in a folder of this rank, unless the user has named one. torch makes the folder
    when it is imported for the compiler, as transformers does."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), f"{prefix()}{COMPILED}")))
