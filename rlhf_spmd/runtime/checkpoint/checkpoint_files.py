"""Checkpoints on disk: each is written completely or not at all, and its files are checked before they are used.

    RUN/checkpoints/iteration-000012/
        rank-0003.safetensors    this rank's share of masters and moments (train_state.py says which)
        drawn-0003.safetensors   this rank's share of the batch in flight (ahead/in_flight.py), if there is one
        state.json               the rest of the run's state
        config.json strategy.py program.json
        manifest.json            SHA-256 of every other file; the run's layout of random numbers

Ranks write into the draft folder `.iteration-000012` beside it, and each leaves the hash of its file there. Rank 0
waits for all hashes, writes the manifest last and renames the folder, so a crash at any byte leaves the previous
checkpoint unchanged. For the same reason a folder is renamed before it is deleted. Nothing is pickled. This file does
not import torch, because a run is read before torch starts.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.json_text import json_value
from rlhf_spmd.files.reading import paths_in, read_bytes, why_no_file
from rlhf_spmd.runtime.failure.failures import NO_ROOM, advice
from rlhf_spmd.runtime.failure.last_checkpoint import MANIFEST, NAME, complete_checkpoints, has_manifest, number_of
from rlhf_spmd.runtime.generation.random_streams import RANDOM_LAYOUT

FORMAT = 2
DIRECTORY_MODE = 0o750
CHUNK_BYTES = 16 * 2**20  # hashed and written at a time
POLL_S = 0.02
STATE = "state.json"
DRAWN = "drawn-"  # beginning of the names of files with the batch in flight


def checkpoint_folder(root: Path, iteration: int) -> Path:
    """Returns the checkpoint made after this many iterations; root: RUN/checkpoints."""
    return root / f"iteration-{iteration:06d}"


def draft_folder(root: Path, iteration: int) -> Path:
    """Returns the folder in which it is written."""
    return root / f".iteration-{iteration:06d}"


def rank_file(rank: int) -> str:
    return f"rank-{rank:04d}.safetensors"


def drawn_file(rank: int) -> str:
    """Returns what a rank stores of the batch in flight."""
    return f"{DRAWN}{rank:04d}.safetensors"


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_json(path: Path, values: object) -> str:
    """Calls `write` with values as JSON."""
    return write(path, [(json.dumps(values, indent=1) + "\n").encode()])


def write(path: Path, parts: Iterable[bytes | memoryview]) -> str:
    """Writes a new file, which is on disk when this returns -> its SHA-256. Raises UserError if it can't be written."""
    digest = hashlib.sha256()
    try:
        with path.open("wb", buffering=0) as file:
            for part in parts:
                for start in range(0, len(part), CHUNK_BYTES):
                    chunk = part[start : start + CHUNK_BYTES]
                    digest.update(chunk)
                    while len(chunk):
                        chunk = chunk[os.write(file.fileno(), chunk) :]
            os.fsync(file.fileno())
    except OSError as error:
        with suppress(OSError):
            path.unlink()  # leaves its room to other files
        raise unwritable(path, error) from error
    return digest.hexdigest()


def unwritable(path: Path, error: OSError) -> UserError:
    fix = advice(error) + ", or lower checkpoint.keep" * (error.errno in NO_ROOM)
    return UserError(
        f"the checkpoint file {path} can't be written: {error.strerror or error}; {fix}. Earlier checkpoints are "
        "unchanged"
    )


def gone(folder: Path) -> UserError:
    """Returns the error for a run folder that is no longer there."""
    return UserError(
        f"the run folder {folder} is gone: it was deleted, moved or replaced while the run was writing into it; start "
        "the run again, and keep its folder until the run has ended"
    )


def make_draft(root: Path, iteration: int) -> Path:
    """Makes the draft folder of a checkpoint, on the rank that needs it first. Raises UserError."""
    draft = draft_folder(root, iteration)
    try:
        root.mkdir(DIRECTORY_MODE, exist_ok=True)
        draft.mkdir(DIRECTORY_MODE, exist_ok=True)
    except OSError as error:
        raise unwritable(draft, error) from error
    return draft


def say_written(draft: Path, name: str, sha256: str) -> None:
    """Writes the hash of a finished file, which `wait_for` reads."""
    temporary = draft / f".{name}.hash.new"
    write(temporary, [sha256.encode()])
    temporary.rename(draft / f".{name}.hash")


def wait_for(draft: Path, names: Iterable[str], *, deadline_s: float) -> dict[str, str]:
    """Waits for files that other ranks write -> name and hash of each. Raises UserError at the deadline."""
    hashes, began = {}, time.monotonic()
    for name in names:
        record = draft / f".{name}.hash"
        while not record.exists():
            if time.monotonic() - began > deadline_s:
                raise UserError(
                    f"{draft / name} has not been written within {deadline_s:g} s; is the run folder on a disk that "
                    "all hosts share, and fast enough? If it is, raise deadline_s"
                )
            time.sleep(POLL_S)
        hashes[name] = record.read_text(encoding="utf-8")
    return hashes


def commit(root: Path, iteration: int, files: Mapping[str, str]) -> Path:
    """Turns a draft, whose files are all written, into the checkpoint. Raises UserError if the disk is full.

    files: name and hash of each.
    """
    draft, folder = draft_folder(root, iteration), checkpoint_folder(root, iteration)
    for record in draft.glob(".*.hash"):
        record.unlink()
    facts = {"format": FORMAT, "random_layout": RANDOM_LAYOUT, "iteration": iteration, "files": dict(files)}
    write_json(draft / MANIFEST, facts)
    sync(draft)
    if folder.exists():  # this run began before it, so another one wrote it: the disk has no locks
        raise UserError(f"{folder} exists already: another run writes to this folder, too; end one of them")
    try:
        draft.rename(folder)
    except OSError as error:
        raise unwritable(folder, error) from error
    sync(root)
    return folder


def keep_newest(root: Path, num: int, best: int | None = None) -> None:
    """Deletes all complete checkpoints but the newest `num` and the one after `best` iterations."""
    for folder in complete_checkpoints(root)[:-num]:
        if best is None or folder != checkpoint_folder(root, best):
            _remove(folder)


def remove_drafts(root: Path) -> None:
    """Deletes folders that a killed run has left half written or half deleted, or somebody half copied."""
    for folder in [*root.glob(".iteration-*"), *without_manifest(root)]:
        shutil.rmtree(folder, ignore_errors=True)


def without_manifest(root: Path) -> list[Path]:
    """Returns the folders that are named like a checkpoint but are incomplete."""
    folders = [path for path in paths_in(root, "iteration-*") if path.is_dir()]
    return [path for path in folders if NAME.fullmatch(path.name) and not has_manifest(path)]


def _remove(folder: Path) -> None:
    """Deletes a folder; renames it first, so that no half of it looks like a checkpoint."""
    grave = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(grave, ignore_errors=True)
    folder.rename(grave)
    shutil.rmtree(grave, ignore_errors=True)


def sync(path: Path) -> None:
    """Makes a file, or the names in a folder, survive a power failure, if the file system can."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint with a valid manifest. Its files are checked by `verify`. files: name and SHA-256 of each."""

    folder: Path
    iteration: int
    files: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> "Checkpoint":
        """Raises UserError, naming the file and the fix, if the manifest can't be used."""
        path = folder / MANIFEST
        if why := why_no_file(path):
            raise unusable(folder, f"{path} {why}")
        with reading(folder, MANIFEST):
            values = json_value(read_bytes(path))
            versions = values.get("format"), values.get("random_layout")
            if versions != (FORMAT, RANDOM_LAYOUT):  # would differ from an uninterrupted run
                raise UserError(
                    f"{folder} was written by another version of rlhf_spmd (format and random numbers {versions}, here "
                    f"{(FORMAT, RANDOM_LAYOUT)}); resume with the version that started the run, or start a new run"
                )
            files = dict(values["files"])
            outside = [name for name in files if name != Path(name).name]
            if values["iteration"] != number_of(folder) or outside:
                raise ValueError(f"it is not of {folder.name} and files in it")
        return cls(folder, values["iteration"], files)

    def verify(self, names: Iterable[str]) -> None:
        """Raises UserError for the first of these files that is not as it was written."""
        for name in names:
            path = self.folder / name
            if path.is_symlink() or not path.is_file():
                raise unusable(self.folder, f"{path} is {'a link' if path.is_symlink() else 'missing'}")
            with path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            if sha256 != self.files[name]:
                raise unusable(self.folder, f"{path} is damaged: its checksum is not the one that it was written with")

    def text(self, name: str) -> str:
        """Reads a small file and verifies it."""
        with reading(self.folder, name):
            self.verify([name])
            return (self.folder / name).read_text(encoding="utf-8")

    @property
    def tensor_files(self) -> tuple[str, ...]:
        """Names of the files with weights and moments."""
        return tuple(sorted(name for name in self.files if name.startswith("rank-")))


@contextmanager
def reading(folder: Path, name: str) -> Iterator[None]:
    """Raises UserError if the block, which reads a file of a checkpoint, fails."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise unusable(folder, f"{folder / name} can't be read ({type(error).__name__}: {error})") from None


def unusable(folder: Path, problem: str) -> UserError:
    """Returns the error for a checkpoint that can't be used."""
    older = [path for path in complete_checkpoints(folder.parent) if number_of(path) < number_of(folder)]
    fix = f"remove {folder} to resume from {older[-1].name}" if older else "there is no older checkpoint; start anew"
    return UserError(f"{problem}; {fix}")


def newest(root: Path) -> Checkpoint | None:
    """Returns the newest checkpoint, None if there is none. Raises UserError if its manifest can't be used."""
    folders = complete_checkpoints(root)
    return Checkpoint.read(folders[-1]) if folders else None
