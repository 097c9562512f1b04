"""The flight recorder: a rank's last few hundred actions, including the current one, in memory that outlives the rank.

The memory is shared with the process that supervises the rank (supervise.py), which copies it into the run folder twice
a second and once more at the end. The rank therefore never waits for a disk, a full disk does not affect it, and its
last action is known however it ended. Recording an action costs about a microsecond. No torch, no MPI.
"""

import mmap
import os
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.printing import printable
from rlhf_spmd.files.reading import paths_in, read_bytes

FOLDER = "flight"  # in the run folder
MESSAGE = "failure.txt"
NUM_ENTRIES = 512
NOWHERE = -1  # position of an action that is not an instruction

# The memory: the fields of Record in four parts, which have different writers; a ring of entries; the path of the run
# folder, which may be too long for the first part. Records of earlier versions end before it.
MAGIC = b"rlhf-fl1"
WHO, NOW = struct.Struct("<8s i i i 64s 512s i i"), struct.Struct("<Q i i d H 254s")
BEAT, END = struct.Struct("<d d q q q c"), struct.Struct("<d i i")
HEADER = struct.Struct(f"{WHO.format}{NOW.format[1:]}{BEAT.format[1:]}{END.format[1:]}?")
NOW_AT, BEAT_AT = WHO.size, WHO.size + NOW.size
END_AT, LEFT_AT = BEAT_AT + BEAT.size, HEADER.size - 1
DONE, UNDONE = 1, 2  # in the byte at LEFT_AT: whether the status of the rank's work is known; 0: it has not left
DEVICE_AT = BEAT_AT + struct.calcsize("<d d q q")
ENTRY = struct.Struct("<i i d d 40s")  # the fields of Entry
END_OF_ENTRY_AT = struct.calcsize("<i i d")
NUMBER, TIME = struct.Struct("<q"), struct.Struct("<d")
TEXT_BYTES, RING_AT = 254, 1024
PATH_AT, PATH_BYTES = RING_AT + NUM_ENTRIES * ENTRY.size, 4096  # no path is longer
SIZE = PATH_AT + PATH_BYTES
LAST_S = 253_402_300_799.0  # the last second that a calendar has
assert HEADER.size <= RING_AT


class Entry(NamedTuple):
    """One action of a rank. Times are seconds of the wall clock; end_s is None while it runs."""

    iteration: int
    position: int  # in the rank's instruction list, or NOWHERE
    begin_s: float
    end_s: float | None
    text: str


class Record(NamedTuple):
    """The contents of a rank's recorder, in the order of HEADER. Times are seconds of the wall clock."""

    magic: str
    rank: int
    size: int
    process: int
    host: str
    run: str  # the run folder, once it is known
    board: int  # the descriptor of the memory that the node's ranks share; -1: none
    num_instructions: int  # of the rank's list, once it is known
    num_begun: int
    iteration: int
    position: int
    since_s: float  # when the current action began
    text_bytes: int
    text: str  # the current action
    beat_s: float  # the last heartbeat of its supervisor
    processor_s: float
    memory_bytes: int
    most_memory_bytes: int
    device_bytes: int
    state: str  # of the process, from the kernel: R, S, D, T (stopped), Z
    end_s: float  # when it ended; 0 while it runs
    status: int
    signal: int
    has_left: bool  # its exit was intended
    entries: tuple[Entry, ...]  # the oldest first

    @property
    def where(self) -> str:
        """For messages: `iteration 3: Run actor_train with ranks 0-3 (instruction 7 of 12)`."""
        of = f" of {self.num_instructions}" if self.num_instructions else ""
        return self.text + (f" (instruction {self.position}{of})" if self.position != NOWHERE else "")


class Flight:
    """The recorder of this rank. memory: SIZE bytes, shared with the supervisor; None: private."""

    def __init__(self, memory: mmap.mmap | None = None):
        self.memory = mmap.mmap(-1, SIZE) if memory is None else memory
        self.count, self.iteration, self.position = 0, NOWHERE, NOWHERE
        self.rank, self.size, self.host, self.run, self.board, self.num_instructions = 0, 1, "", "", -1, 0
        self.describe()

    def describe(self, **facts: int | str) -> None:
        """Sets facts of this rank, by their names in Record. With `run`, the absolute path of the run folder, the
        supervisor also writes the record there."""
        assert facts.keys() <= vars(self).keys(), facts
        vars(self).update(facts)
        host, run = os.fsencode(self.host)[:64], os.fsencode(self.run)  # in any locale
        if len(run) > PATH_BYTES:
            raise UserError(
                f"the path of the run folder has more than {PATH_BYTES:,} bytes; give a shorter one (--runs)"
            )
        self.memory[PATH_AT:SIZE] = run.ljust(PATH_BYTES, b"\0")
        who = (MAGIC, self.rank, self.size, os.getpid(), host, run[:512], self.board, self.num_instructions)
        WHO.pack_into(self.memory, 0, *who)

    def begin(self, text: bytes, iteration: int, position: int) -> None:
        """Records that this rank ends its current action and begins another."""
        now, memory = time.time(), self.memory
        at = RING_AT + self.count % NUM_ENTRIES * ENTRY.size
        if self.count:
            before = RING_AT + (self.count - 1) % NUM_ENTRIES * ENTRY.size
            TIME.pack_into(memory, before + END_OF_ENTRY_AT, now)
        ENTRY.pack_into(memory, at, iteration, position, now, 0.0, text)
        self.count += 1
        self.iteration, self.position = iteration, position
        NOW.pack_into(memory, NOW_AT, self.count, iteration, position, now, min(len(text), TEXT_BYTES), text)

    @property
    def where(self) -> str:
        """This rank's current action, as Record.where."""
        return record_in(self.memory).where

    def leave(self, status: int = 0) -> None:
        """Marks the following exit as intended: any error has been reported, or will be. The rank's work has this
        status, whatever that of its process."""
        END.pack_into(self.memory, END_AT, 0.0, status, 0)
        self.memory[LEFT_AT] = DONE

    def leave_undone(self) -> None:
        """Marks the following exit as intended, unless the status of the work is known; that of the process counts."""
        if self.memory[LEFT_AT] != DONE:
            END.pack_into(self.memory, END_AT, 0.0, 1, 0)  # if something keeps the rank
            self.memory[LEFT_AT] = UNDONE

    def set_device_bytes(self, num_bytes: int) -> None:
        """Records the memory in use on this rank's device."""
        NUMBER.pack_into(self.memory, DEVICE_AT, num_bytes)


def parse(memory: bytes | mmap.mmap) -> Record | None:
    """Reads a recorder's memory or file; None if it is not a record, or has times that no clock shows. A text may be
    torn if the rank was writing it."""
    if len(memory) < PATH_AT or memory[: len(MAGIC)] != MAGIC:
        return None
    record = Record._make([*map(_decoded, HEADER.unpack_from(memory, 0)), ()])
    if record.rank < 0 or not _are_times(record.since_s, record.beat_s, record.end_s):
        return None
    entries = []
    for index in range(max(0, record.num_begun - NUM_ENTRIES), record.num_begun):
        fields = ENTRY.unpack_from(memory, RING_AT + index % NUM_ENTRIES * ENTRY.size)
        entry = Entry._make(map(_decoded, fields))
        if _are_times(entry.begin_s, entry.end_s or 0.0):
            entries.append(entry._replace(end_s=entry.end_s or None))
    return record._replace(entries=tuple(entries), run=_run_of(memory))


def record_in(memory: mmap.mmap) -> Record:
    """Reads the memory of a recorder of this job."""
    record = parse(memory)
    assert record is not None, "Flight() has made it a record"
    return record


def _are_times(*seconds: float) -> bool:
    return all(0.0 <= one <= LAST_S for one in seconds)


def _decoded(value: Any) -> Any:
    """Returns bytes as text, without their padding; numbers as they are."""
    return value.rstrip(b"\0").decode(errors="replace") if isinstance(value, bytes) else value


def record_path(memory: mmap.mmap) -> Path | None:
    """Returns the file for the record in this memory; None while the run folder is unknown. Does not parse the rest,
    which would take most of a millisecond."""
    run, rank = _run_of(memory), WHO.unpack_from(memory, 0)[1]
    return file_of(run, rank) if run else None


def _run_of(memory: bytes | mmap.mmap) -> str:
    """Returns the path of the run folder, whatever the locale."""
    path = memory[PATH_AT:SIZE] if len(memory) >= SIZE else WHO.unpack_from(memory, 0)[5]
    return os.fsdecode(path.rstrip(b"\0"))


def file_of(folder: str | Path, rank: int) -> Path:
    """Returns the file of a rank's record."""
    return Path(folder) / FOLDER / f"rank-{rank:04d}.bin"


def read_records(folder: str | Path) -> list[Record]:
    """Returns the records of a run folder, by rank; files that are not records are left out. Raises OSError and
    UserError for what can't be read."""
    records = []
    for path in paths_in(Path(folder) / FOLDER, "rank-*.bin"):
        with suppress(FileNotFoundError):
            records.append(parse(read_bytes(path)))
    return [record for record in records if record is not None]


def keep_message(folder: str, text: str) -> None:
    """Stores the error message of a failed job for a postmortem; only the first one is kept."""
    if not folder:
        return
    path = Path(folder) / FOLDER / MESSAGE
    try:
        with path.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(printable(text) + "\n")
    except FileExistsError:
        pass
    except OSError:  # the disk is full: keep no partial message
        with suppress(OSError):
            path.unlink(missing_ok=True)


def read_message(folder: str | Path) -> str | None:
    """Returns the error message of a failed job; None if there is none. Raises OSError if it can't be read."""
    try:
        return read_bytes(Path(folder) / FOLDER / MESSAGE).decode(errors="replace").rstrip()
    except FileNotFoundError:
        return None


def forget(folder: str | Path, num_ranks: int) -> None:
    """Removes files of an earlier part of this run that a new part with `num_ranks` ranks will not overwrite."""
    (Path(folder) / FOLDER / MESSAGE).unlink(missing_ok=True)
    kept = {file_of(folder, rank) for rank in range(num_ranks)}
    for path in (Path(folder) / FOLDER).glob("rank-*.bin"):
        if path not in kept:
            path.unlink()
