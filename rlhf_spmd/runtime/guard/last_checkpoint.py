"""From which checkpoint a run can be resumed, and with which command: what a message about a failure ends with.

A checkpoint folder with a manifest is whole (checkpoint/store.py writes it last). No torch, no MPI.
"""

import re
import shlex
from pathlib import Path

MANIFEST = "manifest.json"
NAME = re.compile(r"iteration-(\d{6,})")


def whole(root: Path) -> list[Path]:
    """All folders with a manifest, oldest first."""
    found = [path for path in root.glob("iteration-*") if NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(found, key=number_of)


def number_of(folder: Path) -> int:
    """After how many iterations a checkpoint was made."""
    return int(NAME.fullmatch(folder.name)[1])


def newest_checkpoint(run: str | Path) -> Path | None:
    """The newest whole checkpoint of a run folder, the one that a resumed run goes on from."""
    found = whole(Path(run) / "checkpoints")
    return found[-1] if found else None


def how_to_go_on(run: str, num_ranks: int) -> str:
    """For the end of a message about a failure: the newest whole checkpoint and the command that goes on from it."""
    if not run:
        return ""
    newest = newest_checkpoint(run)
    if newest is None:
        return f"There is no whole checkpoint in {run}."
    launcher = f"mpirun -n {num_ranks} " if num_ranks > 1 else ""
    command = f"{launcher}python -m rlhf_spmd train --resume {shlex.quote(run)}"
    return f"The newest whole checkpoint is {newest}; go on with: {command}"
