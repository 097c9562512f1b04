"""The newest checkpoint of a run and the command that resumes from it, for the end of error messages.

A checkpoint folder with a manifest is complete, because checkpoint/checkpoint_files.py writes the manifest last. No
torch, no MPI.
"""

import re
import shlex
from pathlib import Path

from rlhf_spmd.files.reading import paths_in

MANIFEST = "manifest.json"
NAME = re.compile(r"iteration-(\d{6,})")


def complete_checkpoints(root: Path) -> list[Path]:
    """Returns all complete checkpoints, oldest first. Raises OSError if the folder can't be read."""
    folders = [path for path in paths_in(root, "iteration-*") if NAME.fullmatch(path.name) and has_manifest(path)]
    return sorted(folders, key=number_of)


def has_manifest(folder: Path) -> bool:
    """Returns whether a folder has a manifest, also one that can't be read, e.g. a folder or a broken link: who reads
    it says so. Raises OSError."""
    try:
        (folder / MANIFEST).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def number_of(folder: Path) -> int:
    """Returns the number of iterations after which a checkpoint was made."""
    found = NAME.fullmatch(folder.name)
    assert found is not None, f"{folder} is not a checkpoint"
    return int(found[1])


def newest_checkpoint(folder: str | Path) -> Path | None:
    """Returns the newest complete checkpoint of a run folder, from which `--resume` continues."""
    folders = complete_checkpoints(Path(folder) / "checkpoints")
    return folders[-1] if folders else None


def resume_command(folder: str | Path, num_ranks: int) -> str:
    """Returns the command that resumes a run."""
    launcher = f"mpirun -n {num_ranks} " if num_ranks > 1 else ""
    return f"{launcher}python -m rlhf_spmd train --resume {shlex.quote(str(folder))}"


def resume_hint(folder: str, num_ranks: int) -> str:
    """Returns the end of an error message: the newest complete checkpoint and the command that resumes from it."""
    if not folder:
        return ""
    try:
        newest = newest_checkpoint(folder)
    except OSError as error:  # e.g. too many open files; it must not hide the error that is reported
        return (
            f"Its checkpoints can't be listed here ({error.strerror}); resume with: {resume_command(folder, num_ranks)}"
        )
    if newest is None:
        return f"There is no complete checkpoint in {folder}."
    return f"The newest complete checkpoint is {newest}; resume with: {resume_command(folder, num_ranks)}"
