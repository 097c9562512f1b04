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
from dataclasses import dataclass
from pathlib import Path

FOLDER = "flight"  # in the run folder
MESSAGE = "failure.txt"
NUM_ENTRIES = 512
NOWHERE = -1  # position of an action that is not an instruction

MAGIC = b"rlhf-fl1"
WHO = struct.Struct("<8s i i i 64s 512s i i")  # magic, rank, size, process, host, run folder, board, num instructions
NOW = struct.Struct("<Q i i d H 254s")  # entries begun, iteration, position, since, length of the text, the text
BEAT = struct.Struct("<d d q q q c")  # time, processor seconds, memory, peak memory, device memory, process state
END = struct.Struct("<d i i")  # time, exit status, signal
ENTRY = struct.Struct("<i i d d 40s")  # iteration, position, begin, end, text
NUMBER, TIME = struct.Struct("<q"), struct.Struct("<d")
NOW_AT = WHO.size
BEAT_AT = NOW_AT + NOW.size
END_AT = BEAT_AT + BEAT.size
RING_AT = 1024
SIZE = RING_AT + NUM_ENTRIES * ENTRY.size
TEXT_BYTES = 254
BOARD_AT = struct.calcsize("<8s i i i 64s 512s")
DEVICE_AT = BEAT_AT + struct.calcsize("<d d q q")
END_OF_ENTRY_AT = struct.calcsize("<i i d")
LEFT_AT = END_AT + END.size  # a byte
assert LEFT_AT < RING_AT


@dataclass(frozen=True, slots=True)
class Entry:
    """One action of a rank. Times are seconds of the wall clock; end_s is None while it runs."""

    iteration: int
    position: int  # in the rank's instruction list, or NOWHERE
    begin_s: float
    end_s: float | None
    text: str


@dataclass(frozen=True, slots=True)
class Record:
    """The contents of a rank's recorder, in the order of WHO, NOW, BEAT and END. Times are seconds of the wall clock."""

    rank: int
    size: int
    process: int
    host: str
    run: str  # the run folder, once it is known
    num_instructions: int  # of the rank's list, once it is known
    num_begun: int
    iteration: int
    position: int
    since_s: float  # when the current action began
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
    entries: tuple[Entry, ...]  # the oldest first

    @property
    def where(self) -> str:
        """For messages: `iteration 3: Run actor_train with ranks 0-3 (instruction 7 of 12)`."""
        return where(self.text, self.position, self.num_instructions)


def where(text: str, position: int, num_instructions: int) -> str:
    """The text of an action, with its position in the rank's instruction list if it has one."""
    of = f" of {num_instructions}" if num_instructions else ""
    return text + (f" (instruction {position}{of})" if position != NOWHERE else "")


class Flight:
    """The recorder of this rank. memory: SIZE bytes, shared with the supervisor; None: private."""

    def __init__(self, memory: mmap.mmap | None = None):
        self.memory = mmap.mmap(-1, SIZE) if memory is None else memory
        self.count, self.iteration, self.position, self.num_instructions = 0, NOWHERE, NOWHERE, 0
        self.run, self.board = "", -1
        self._identity = (0, 1, "")
        self._write_identity()

    def identify(self, rank: int, size: int, host: str, board: int) -> None:
        """Sets this rank's identity; board: the descriptor of the memory that the node's ranks share."""
        self._identity, self.board = (rank, size, host), board
        self._write_identity()

    def set_run(self, folder: str | Path) -> None:
        """From now on the supervisor also writes the record to this run folder."""
        self.run = str(Path(folder).absolute())
        self._write_identity()

    def set_program(self, num_instructions: int) -> None:
        """Sets the length of this rank's instruction list."""
        self.num_instructions = num_instructions
        self._write_identity()

    def _write_identity(self) -> None:
        rank, size, host = self._identity
        who = (MAGIC, rank, size, os.getpid(), host.encode()[:64], self.run.encode()[:512])
        WHO.pack_into(self.memory, 0, *who, self.board, self.num_instructions)

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
        _, _, _, _, length, text = NOW.unpack_from(self.memory, NOW_AT)
        return where(text[:length].decode(errors="replace"), self.position, self.num_instructions)

    def leave(self) -> None:
        """Marks the following exit as intended: any error has been reported, or will be."""
        self.memory[LEFT_AT] = 1

    def set_device_bytes(self, num_bytes: int) -> None:
        """Records the memory in use on this rank's device."""
        NUMBER.pack_into(self.memory, DEVICE_AT, num_bytes)


def parse(memory: bytes | mmap.mmap) -> Record | None:
    """Reads a recorder's memory or file; None if it is not a record. A text may be torn if the rank was writing it."""
    if len(memory) < SIZE or memory[: len(MAGIC)] != MAGIC:
        return None
    _, rank, size, process, host, run, _, num_instructions = WHO.unpack_from(memory, 0)
    num_begun, iteration, position, since_s, length, text = NOW.unpack_from(memory, NOW_AT)
    *beat, state = BEAT.unpack_from(memory, BEAT_AT)
    entries = []
    for index in range(max(0, num_begun - NUM_ENTRIES), num_begun):
        of, place, began_s, ended_s, what = ENTRY.unpack_from(memory, RING_AT + index % NUM_ENTRIES * ENTRY.size)
        entries.append(Entry(of, place, began_s, ended_s or None, _text(what)))
    return Record(
        *(rank, size, process, _text(host), _text(run), num_instructions),
        *(num_begun, iteration, position, since_s, text[:length].decode(errors="replace")),
        *(*beat, _text(state), *END.unpack_from(memory, END_AT), tuple(entries)),
    )


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")


def record_path(memory: mmap.mmap) -> Path | None:
    """The file for the record in this memory; None while the run folder is unknown. Does not parse the rest, which
    would take most of a millisecond."""
    _, rank, _, _, _, run, _, _ = WHO.unpack_from(memory, 0)
    return file_of(_text(run), rank) if run.rstrip(b"\0") else None


def file_of(run: str | Path, rank: int) -> Path:
    """The file of a rank's record."""
    return Path(run) / FOLDER / f"rank-{rank:04d}.bin"


def read_records(run: str | Path) -> list[Record]:
    """The records of a run folder, by rank; unreadable ones are left out."""
    records = []
    for path in sorted((Path(run) / FOLDER).glob("rank-*.bin")):
        with suppress(OSError):
            records.append(parse(path.read_bytes()))
    return [record for record in records if record is not None]


def keep_message(run: str, text: str) -> None:
    """Stores the error message of a failed job for a postmortem; only the first one is kept."""
    if not run:
        return
    path = Path(run) / FOLDER / MESSAGE
    try:
        with path.open("x") as file:
            file.write(text + "\n")
    except FileExistsError:
        pass
    except OSError:  # the disk is full: keep no partial message
        with suppress(OSError):
            path.unlink(missing_ok=True)


def read_message(run: str | Path) -> str | None:
    """The error message of a failed job; None if there is none."""
    try:
        return (Path(run) / FOLDER / MESSAGE).read_text().rstrip()
    except OSError:
        return None


def forget(run: str | Path, num_ranks: int) -> None:
    """Removes files of an earlier part of this run that a new part with `num_ranks` ranks will not overwrite."""
    (Path(run) / FOLDER / MESSAGE).unlink(missing_ok=True)
    kept = {file_of(run, rank) for rank in range(num_ranks)}
    for path in (Path(run) / FOLDER).glob("rank-*.bin"):
        if path not in kept:
            path.unlink()
