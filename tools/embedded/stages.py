"""Training runs of this program, as users start them, for the scripts that make models; and rows for these runs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def write_rows(path: Path, rows: Iterable[Mapping]) -> Path:
    """Writes one object per line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(words: list[str]) -> None:
    """Runs a command in the repository, with the programs of this Python's environment. Raises CalledProcessError."""
    found = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    subprocess.run(words, check=True, cwd=REPOSITORY, env=os.environ | {"PATH": found})
