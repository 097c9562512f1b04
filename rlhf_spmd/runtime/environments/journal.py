"""The answers of tools and environments in a folder of the run, so that a resumed run repeats its draws without calls.

There is a file for each iteration and rank, with one line of JSON for each answer, written before it is used. A line is
found by prompt, sample, turn and call in the files of all ranks, so a resume may use other ranks. A process that is
killed leaves a torn last line at most, which was never used: readers ignore it, and the rank that goes on with the file
removes it. `asked` lines say that a call was about to be made; without an answer it is not known whether it was.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_spmd.errors import UserError

NAME = re.compile(r"(?P<name>.+)-(?P<iteration>\d+)-rank(?P<rank>\d+)\.jsonl")
Key = tuple[int, int, int, int]  # prompt, sample, turn, call
OPENING, END = 0, -1  # instead of the number of a turn, which are counted from 1


class Journal:
    """The lines of one iteration, of all ranks; and the file to which this rank adds."""

    def __init__(self, folder: str | Path, iteration: int, rank: int, name: str = "rollout"):
        """name: tells apart what is drawn in the same iteration, such as evaluations. Raises UserError for a line that
        is not torn but damaged."""
        self.folder, self.path = Path(folder), Path(folder) / f"{name}-{iteration}-rank{rank}.jsonl"
        self.answers: dict[Key, dict[str, Any]] = {}
        self.asked: set[Key] = set()
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.folder.glob(f"{name}-{iteration}-rank*.jsonl")):
            for line in _lines(path):
                key: Key = tuple(line["key"])
                if line.get("asked"):
                    self.asked.add(key)
                else:
                    self.answers.setdefault(key, line)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        text = os.pread(self._file, os.fstat(self._file).st_size, 0)
        os.ftruncate(self._file, text.rfind(b"\n") + 1)

    def ask(self, key: Key) -> None:
        """Writes that a call is about to be made."""
        self._write({"key": key, "asked": True})

    def add(self, key: Key, answer: dict[str, Any]) -> None:
        """Writes an answer."""
        self.answers[key] = line = {"key": list(key), **answer}
        self._write(line)

    def close(self) -> None:
        os.close(self._file)

    def _write(self, line: dict[str, Any]) -> None:
        data = json.dumps(line).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise UserError(f"{self.path} can't be written ({error.strerror}): make room on its disk") from None


def forget(folder: str | Path, before: int) -> None:
    """Removes the files of iterations that a complete checkpoint covers: those before this one."""
    for path in Path(folder).glob("*.jsonl"):
        found = NAME.fullmatch(path.name)
        if found and int(found["iteration"]) < before:
            with suppress(FileNotFoundError):  # another rank has
                path.unlink()


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the whole lines of a file. Raises UserError."""
    *lines, _ = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number} is damaged ({error}): restore it, or remove the file") from None
