"""Checkpoints on disk: whole or not there at all, and nothing in them is believed before it has been checked.

    RUN/checkpoints/iteration-000012/
        rank-0003.safetensors    this rank's share of masters and moments (train_state.py says which)
        state.json               what else a run's future depends on
        config.json strategy.py program.json
        manifest.json            size and SHA-256 of every other file; which layout of random numbers the run has

Ranks write into `.iteration-000012` beside it, and each leaves a record of its file there. Rank 0 waits for all
records, writes the manifest last and renames the folder, so a crash at any byte leaves the checkpoint before as it was.
What is deleted is renamed first, for the same reason. Nothing is pickled. No torch here: what is resumed is read before
torch starts.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.generation.random_streams import RANDOM_LAYOUT
from rlhf_spmd.runtime.guard.last_checkpoint import MANIFEST, complete_checkpoints, number_of

FORMAT = 1
DIRECTORY_MODE = 0o750
CHUNK_BYTES = 16 * 2**20  # hashed and written at a time
POLL_S = 0.02
STATE = "state.json"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a manifest says of a file."""

    num_bytes: int
    sha256: str


def checkpoint_folder(root: Path, iteration: int) -> Path:
    """Where the checkpoint after so many iterations lies; root: RUN/checkpoints."""
    return root / f"iteration-{iteration:06d}"


def draft_folder(root: Path, iteration: int) -> Path:
    """Where it is written."""
    return root / f".iteration-{iteration:06d}"


def rank_file(rank: int) -> str:
    return f"rank-{rank:04d}.safetensors"


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_json(path: Path, values: object) -> FileRecord:
    return write(path, [(json.dumps(values, indent=1) + "\n").encode()])


def write(path: Path, parts: Iterable[bytes | memoryview]) -> FileRecord:
    """A new file, hashed while it is written, on disk when this returns. parts: runs of bytes. Raises UserError if it
    does not fit."""
    digest, num_bytes = hashlib.sha256(), 0
    try:
        with path.open("wb", buffering=0) as file:
            for part in parts:
                for start in range(0, len(part), CHUNK_BYTES):
                    chunk = part[start : start + CHUNK_BYTES]
                    digest.update(chunk)
                    _write_all(file.fileno(), chunk)
                    num_bytes += len(chunk)
            os.fsync(file.fileno())
    except OSError as error:
        with suppress(OSError):
            path.unlink()  # what is half written needs the room that others lack
        raise unwritable(path, error) from error
    return FileRecord(num_bytes, digest.hexdigest())


def _write_all(descriptor: int, chunk: bytes | memoryview) -> None:
    while len(chunk):
        chunk = chunk[os.write(descriptor, chunk) :]


def unwritable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"the checkpoint file {path} can't be written: {error.strerror or error}; make room there, or lower "
        "checkpoint.keep. Checkpoints that were there before are as they were"
    )


def gone(folder: Path) -> UserError:
    """What to say of a run folder that is no longer there."""
    return UserError(
        f"the run folder {folder} is gone: it was deleted, moved or replaced while the run was writing into it; start "
        "the run again, and keep its folder until the run has ended"
    )


def make_draft(root: Path, iteration: int) -> Path:
    """The folder that a checkpoint is written into, made by the rank that comes first. Raises UserError."""
    draft = draft_folder(root, iteration)
    try:
        root.mkdir(DIRECTORY_MODE, exist_ok=True)
        draft.mkdir(DIRECTORY_MODE, exist_ok=True)
    except OSError as error:
        raise unwritable(draft, error) from error
    return draft


def say_written(draft: Path, name: str, record: FileRecord) -> None:
    """Leaves the record of a finished file for `wait_for`."""
    temporary = draft / f".{name}.record.new"
    write_json(temporary, asdict(record))
    temporary.rename(draft / f".{name}.record")


def wait_for(draft: Path, names: Iterable[str], *, deadline_s: float) -> dict[str, FileRecord]:
    """Name -> record of files that other ranks write, as soon as all of them are there. Raises UserError at the
    deadline."""
    lacking, found, began = list(names), {}, time.monotonic()
    while True:
        for name in list(lacking):
            with suppress(FileNotFoundError):
                found[name] = FileRecord(**json.loads((draft / f".{name}.record").read_text()))
                lacking.remove(name)
        if not lacking:
            return found
        if time.monotonic() - began > deadline_s:
            raise UserError(
                f"{draft / lacking[0]} has not been written within {deadline_s:g} s; is the run folder on a disk that "
                "all hosts share, and fast enough? If it is, raise deadline_s"
            )
        time.sleep(POLL_S)


def commit(root: Path, iteration: int, files: Mapping[str, FileRecord]) -> Path:
    """The draft, of which all files are written, becomes the checkpoint. Raises UserError if the disk is full."""
    draft, folder = draft_folder(root, iteration), checkpoint_folder(root, iteration)
    for record in draft.glob(".*.record"):
        record.unlink()
    manifest = {"format": FORMAT, "random_layout": RANDOM_LAYOUT, "iteration": iteration}
    manifest["files"] = {name: {"bytes": file.num_bytes, "sha256": file.sha256} for name, file in files.items()}
    write_json(draft / MANIFEST, manifest)
    _sync(draft)
    try:
        if folder.exists():
            if (folder / MANIFEST).exists():  # this run would have begun there: the disk has no locks
                raise UserError(f"{folder} is there already: another run goes on in this folder, too; end one of them")
            _remove(folder)
        draft.rename(folder)
    except OSError as error:
        raise unwritable(folder, error) from error
    _sync(root)
    return folder


def keep_newest(root: Path, num: int) -> None:
    """Deletes all whole checkpoints but the newest `num`."""
    for folder in complete_checkpoints(root)[:-num]:
        _remove(folder)


def remove_drafts(root: Path) -> None:
    """Deletes what a run that was killed left half written or half deleted."""
    for folder in root.glob(".iteration-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Renamed first: what is half deleted must not be taken for a checkpoint."""
    grave = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(grave, ignore_errors=True)
    folder.rename(grave)
    shutil.rmtree(grave, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Makes names in a folder outlive a power failure, where the file system knows how."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ---- reading ---------------------------------------------------------------------------------------------------------


def without_manifest(root: Path) -> list[Path]:
    """Folders that look like a checkpoint but are none."""
    folders = [path for path in root.glob("iteration-*") if path.is_dir()]
    return sorted(path for path in folders if not (path / MANIFEST).is_file())


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder whose manifest makes sense; its files are as the manifest says only after `verify`."""

    folder: Path
    iteration: int
    files: Mapping[str, FileRecord]
    random_layout: int  # as streams.RANDOM_LAYOUT

    @classmethod
    def read(cls, folder: Path) -> "Checkpoint":
        """Raises UserError, with the file's name and the mend, for a manifest that can't be used."""
        path = folder / MANIFEST
        try:
            values = json.loads(path.read_text())
            if values["format"] != FORMAT:
                raise _refused(folder, f"{path} is of format {values['format']!r}, this program reads {FORMAT}")
            iteration, random_layout = values["iteration"], values.get("random_layout", 1)
            files = {name: FileRecord(int(file["bytes"]), file["sha256"]) for name, file in values["files"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _refused(folder, f"{path} can't be read ({type(error).__name__}: {error})") from None
        if iteration != number_of(folder):
            raise _refused(folder, f"{path} is of iteration {iteration!r}, but its folder is {folder.name}")
        for name in files:
            if name != Path(name).name or name in ("", ".", "..") or "\\" in name:
                raise _refused(folder, f"{path} names the file {name!r}, which is outside the folder")
        lacking = [name for name in (STATE, "config.json", "strategy.py") if name not in files]
        if lacking or not any(name.endswith(".safetensors") for name in files):
            raise _refused(folder, f"{path} does not name {', '.join(lacking) or 'any rank-*.safetensors'}")
        return cls(folder, iteration, files, random_layout)

    def verify(self, names: Iterable[str]) -> None:
        """Raises UserError for the first of these files that is not what the manifest says."""
        for name in names:
            path, record = self.folder / name, self.files[name]
            if path.is_symlink() or not path.is_file():
                what = "is a link" if path.is_symlink() else "is missing"
                raise _refused(self.folder, f"{path} {what}")
            num_bytes = path.stat().st_size
            if num_bytes != record.num_bytes:
                raise _refused(self.folder, f"{path} has {num_bytes:,} bytes, not {record.num_bytes:,} as written")
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != record.sha256:
                raise _refused(self.folder, f"{path} is damaged: its checksum is not the one that it was written with")

    def text(self, name: str) -> str:
        """A small file, verified."""
        self.verify([name])
        return (self.folder / name).read_text()

    @property
    def tensor_files(self) -> tuple[str, ...]:
        """Names of the files with weights and moments."""
        return tuple(sorted(name for name in self.files if name.endswith(".safetensors")))

    def refused(self, what: str) -> UserError:
        """Why this checkpoint can't be used, and what else there is."""
        return _refused(self.folder, what)


def _refused(folder: Path, what: str) -> UserError:
    older = [path for path in complete_checkpoints(folder.parent) if number_of(path) < number_of(folder)]
    mend = f"remove {folder} to go on from {older[-1].name}" if older else "there is no older checkpoint; start anew"
    return UserError(f"{what}; {mend}")


def newest(root: Path) -> Checkpoint | None:
    """The newest checkpoint, None if there is none. Raises UserError if its manifest can't be used."""
    folders = complete_checkpoints(root)
    return Checkpoint.read(folders[-1]) if folders else None
