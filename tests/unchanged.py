"""The contents of a folder, to compare it before and after a test."""

import hashlib
import os
from pathlib import Path

OF_A_START = (".lock",)  # what every start writes, also one that is refused


def contents(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file, or the target of each link, by relative path, except for what every start
    writes."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file() and name.split(os.sep)[0] not in OF_A_START:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
