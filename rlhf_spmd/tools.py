"""Tools that come with the package: a search in passages of a file, and a program that the model writes.

`environment=rlhf_spmd.tools:python` gives a model the second one. For the first one, a file of your own says where the
passages are; docs/write_an_environment.md shows it, and says what `python` keeps from a program and what it does not.
"""

import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from contextvars import ContextVar
from functools import cache
from pathlib import Path

from rlhf_spmd.errors import UserError

WORD = re.compile(r"\w+")
K1, B = 1.5, 0.75  # of BM25: how soon a word counts no more, and how much long passages count less
MOST_TEXT = 4000  # characters that the model sees of an output
LIMIT_S, MOST_BYTES, MOST_FILE, MOST_OPEN = 10, 2**30, 2**20, 64
# Sets limits and becomes another program. A function to be called after a fork is not safe among threads.
LIMITED = """
import os, resource, sys
for name, most in zip(("CPU", "AS", "FSIZE", "NOFILE", "CORE"), map(int, sys.argv[1:6])):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
os.execv(sys.argv[6], sys.argv[6:])
"""
WALLS = (
    "--unshare-all",
    "--die-with-parent",
    "--new-session",
    "--ro-bind",
    "/",
    "/",
    "--dev",
    "/dev",
    "--proc",
    "/proc",
)


_episode_id: ContextVar[str] = ContextVar("episode_id", default="")


def episode_id() -> str:
    """Returns the name of the episode for which a tool, or a method of an environment, is called. A resumed run makes
    its calls again with the same ones, so they are keys of what must not be done twice. Empty outside of episodes."""
    return _episode_id.get()


def set_episode_id(name: str) -> None:
    """Sets the name of the episode for the calls of this task."""
    _episode_id.set(name)


class Passages:
    """Passages of a file of JSON lines, with the score BM25 (Robertson and Zaragoza, 2009, equation 3.15)."""

    def __init__(self, file: str | Path, key: str = "text"):
        """key: of a line's text. Raises UserError for a file that cannot be read."""
        try:
            lines = Path(file).read_text(encoding="utf-8").split("\n")
            self.texts = [str(json.loads(line)[key]) for line in lines if line.strip()]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{file} has no passages ({type(error).__name__}: {error}): write lines of JSON with {key!r}"
            ) from None
        self._counts = [Counter(WORD.findall(text.lower())) for text in self.texts]
        self._lengths = [sum(counts.values()) for counts in self._counts]
        self._mean = sum(self._lengths) / max(len(self._lengths), 1)
        self._found_in = Counter(word for counts in self._counts for word in counts)

    def search(self, query: str, most: int = 3) -> list[str]:
        """Returns the passages that fit best, the best first; of equal ones the first in the file."""
        words = WORD.findall(query.lower())
        scores = [self._score(words, number) for number in range(len(self.texts))]
        order = sorted(range(len(scores)), key=lambda number: -scores[number])
        return [self.texts[number] for number in order[:most] if scores[number] > 0]

    def _score(self, words: list[str], number: int) -> float:
        counts, score = self._counts[number], 0.0
        for word in words:
            if counts[word]:
                found_in, times = self._found_in[word], counts[word]
                rarity = math.log(1 + (len(self.texts) - found_in + 0.5) / (found_in + 0.5))
                length = 1 - B + B * self._lengths[number] / self._mean
                score += rarity * times * (K1 + 1) / (times + K1 * length)
        return score


def python(code: str) -> str:
    """Runs a Python program and returns what it prints.

    Args:
        code: The program. It must print its result.
    """
    with tempfile.TemporaryDirectory() as folder:
        walls = [_bubblewrap(), *WALLS, "--bind", folder, folder, "--chdir", folder] if _bubblewrap() else []
        program = [*walls, sys.executable, "-I", "-c", code]
        limits = map(str, (LIMIT_S, MOST_BYTES, MOST_FILE, MOST_OPEN, 0))
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", LIMITED, *limits, *program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "HOME": folder, "OMP_NUM_THREADS": "1"},
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"error: the program took more than {LIMIT_S} s"
        except (OSError, ValueError) as error:  # of a program that is too long, or has a null character
            return f"error: {error}"
    text = done.stdout.decode(errors="replace").replace(folder, ".")
    text = text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT // 2]} ... {text[-MOST_TEXT // 2 :]}"
    return text if not done.returncode else f"{text}\nerror: the program ended with status {done.returncode}".strip()


@cache
def _bubblewrap() -> str:
    """Returns the path of bwrap, if it is there and may be used; else empty."""
    path = shutil.which("bwrap")
    if path is None:
        return ""
    tried = subprocess.run([path, *WALLS, "/bin/true"], capture_output=True, check=False)
    return path if tried.returncode == 0 else ""
