"""What this program finds out once, such as by measuring, and keeps for a user: small JSON files in a cache folder."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.json_text import json_text, json_value

T = TypeVar("T")


def user_cache(kind: str) -> Path | None:
    """Returns the user's folder for what this program finds out once; None without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        cache = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return cache / "rlhf_spmd" / kind


def recall(kind: str, name: str, read: Callable[[Any], T | None]) -> T | None:
    """Returns what was kept under a name; None if there is nothing that can be read. read: makes it of the JSON, or
    raises ValueError or UserError."""
    folder = user_cache(kind)
    with suppress(OSError, ValueError, UserError):
        return read(json_value((folder / name).read_bytes())) if folder else None
    return None


def keep(kind: str, name: str, value: object, read: Callable[[Any], object]) -> None:
    """Keeps a value, if the folder can be written, unless another process has done so meanwhile: the first one that
    `read` accepts counts."""
    folder = user_cache(kind)
    with suppress(OSError):
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{name}.{os.getpid()}.{os.urandom(4).hex()}"
        part.write_text(json_text(value), encoding="utf-8")
        try:
            os.link(part, folder / name)
        except FileExistsError:
            if recall(kind, name, read) is None:
                part.replace(folder / name)
        finally:
            part.unlink(missing_ok=True)
