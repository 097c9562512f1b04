"""The names of files outside the run folder, which the ranks of a node share for a moment: in shared memory, or where
temporary files go. Each rank removes its own as soon as all have opened them; if it is killed before, its supervisor
does.
"""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = "/dev/shm"
PREFIX = f"rlhf_spmd_{os.urandom(16).hex()}_"  # of one rank and its supervisor, which is forked after this import


def remove() -> None:
    """Removes those that this rank has left."""
    with suppress(OSError):
        for folder in (SHARED_MEMORY, tempfile.gettempdir()):
            for path in Path(folder).glob(f"{PREFIX}*"):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
