"""The work of whole steps, which both programs read, and the talk with a worker. Torch-free.

A worker is a process of one thread that makes one step for each line of JSON that it reads, and answers with a line.
Seconds are a processor's (`time.process_time`): on an idle machine those of the clock, and on a busy one without the
time that others take.

Lengths that are spread are log-normal with a sigma of 1; most of them are far from the longest. A step on given
responses is one pass over all rows of a set, so that both programs do the same work in each, whatever their order and
their packing.
"""

import json
import math
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_spmd import embedded
from rlhf_spmd.errors import UserError
from tools.embedded import grammar

ROOT = Path(__file__).parents[2]
GRPO = "GRPO"  # the name of its work, for workers
THREADS = 2  # of the comparison of single steps
PROMPTS, SAMPLES = 4, 8
MICRO_BATCH = 8  # responses
LIMIT = 128  # tokens of a response; at full length each has as many
SPREAD_MEDIAN = 20.0  # of spread lengths
LR, KL = 1e-6, 0.04
REWARD = "reward_function=bench.against_trl.work:letters"  # our option
LENGTHS = ("full length", "spread lengths")

SEQUENCES = 16  # of a step on given responses; a pair has two
GIVEN_MICRO_BATCH = 4  # sequences
MEDIAN, MOST_WORDS = 30.0, 160  # of a given response
MOST_TOKENS = 256  # of a prompt and its response, and of a packed row of TRL's


# ---- GRPO -----------------------------------------------------------------------------------------------------------


def prompts() -> list[str]:
    return embedded.path_of("sentiment_prompts.txt").read_text(encoding="utf-8").splitlines()[:PROMPTS]


def lengths_of(lengths: str, step: int) -> list[int]:
    """Returns the lengths of the responses of a step: all to the limit, or spread."""
    num = PROMPTS * SAMPLES
    if lengths == "full length":
        return [LIMIT] * num
    draw = random.Random(step)
    return [_spread(draw, SPREAD_MEDIAN, LIMIT) for _ in range(num)]


def _spread(draw: random.Random, median: float, most: int) -> int:
    return min(max(round(draw.lognormvariate(math.log(median), 1.0)), 1), most)


def letters(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Returns rewards that are cheap, and different for most responses."""
    return [sum(map(ord, response)) % 97 / 50 - 1 for response in responses]


# ---- given responses ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """Steps of one kind, as both programs take them.

    page: of ours.
    promised: least times faster.
    packs: whether TRL packs its rows.
    full: half as many rows, each with the most words.
    theirs: options of TRL's.
    """

    name: str
    page: str
    promised: float
    packs: bool = False
    full: bool = False
    theirs: dict[str, Any] = field(default_factory=dict)

    @property
    def sequences_per_row(self) -> int:
        return 1 if self.page == "sft" else 2


WORKS = {
    work.name: work
    for work in (
        Work("SFT", "sft", 1.5),
        Work("SFT, TRL packs", "sft", 1.0, packs=True, theirs={"packing": True, "max_length": MOST_TOKENS}),
        Work("reward model", "reward_model", 1.5),
        Work("DPO", "dpo", 1.5),
    )
}
ADAPTED = {  # with adapters
    work.name: work for work in (WORKS["SFT"], Work("SFT, full length", "sft", 1.0, full=True), WORKS["DPO"])
}
KNOWN = WORKS | ADAPTED


def rows_of(work: Work) -> list[dict[str, str]]:
    """Returns the rows of a step: English of spread lengths."""
    draw, columns = random.Random(1), ("completion",) if work.page == "sft" else ("chosen", "rejected")
    num_rows = SEQUENCES // work.sequences_per_row // (2 if work.full else 1)
    return [
        {"prompt": grammar.opening(draw).text} | {column: _response(draw, full=work.full) for column in columns}
        for _ in range(num_rows)
    ]


def _response(draw: random.Random, *, full: bool) -> str:
    num_words = _spread(draw, MEDIAN, MOST_WORDS)
    num_words = MOST_WORDS if full else num_words
    words: list[str] = []
    while len(words) < num_words:
        words += "".join(grammar.scene(draw)).split()
    return " " + " ".join(words[:num_words])


# ---- workers --------------------------------------------------------------------------------------------------------


def python_of(target: str) -> str:
    """Returns the interpreter of an environment that `make TARGET` makes. Raises UserError if it is not there."""
    path = ROOT / f".venv-{target}" / "bin" / "python"
    if not path.exists():
        raise UserError(f"the environment {path.parents[1].name} is not there; `make {target}` makes it")
    return str(path)


def versions_of(python: str, peer: str, *others: str) -> dict[str, str]:
    """Returns the versions of a peer and of what computes in its environment. Raises if they do not load."""
    names = [peer, *others]
    code = f"import {', '.join(names)}; print(*[one.__version__ for one in ({', '.join(names)})])"
    lines = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    return dict(zip([peer, *(f"its {name}" for name in others)], lines[-1].split(), strict=True))


def trl_worker(folder: Path, *words: str) -> list[str]:
    """Returns the command of a worker of TRL's."""
    return [python_of("peers"), "-m", "bench.against_trl.trl_worker", str(folder), *words]


@contextmanager
def worker(command: Sequence[str], log: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """Starts a process that makes steps on command; yields the function that tells it one and returns its answer, which
    raises if the process has ended."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with (
        log.open("w", encoding="utf-8") as stderr,
        subprocess.Popen(command, cwd=ROOT, stderr=stderr, **pipes) as process,
    ):

        def step(**told: Any) -> dict[str, Any]:
            with suppress(BrokenPipeError):  # the missing answer says why
                process.stdin.write(json.dumps(told) + "\n")
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"{' '.join(command[:3])} has ended:\n{log.read_text(encoding='utf-8')}")
            return json.loads(line)

        yield step


def commands() -> tuple[Iterator[dict[str, Any]], Callable[..., None]]:
    """Returns a worker's commands, and the function that answers one; whatever else the process prints goes to its
    stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)

    def answer(**found: Any) -> None:
        answers.write(json.dumps(found) + "\n")

    return map(json.loads, sys.stdin), answer


class Step:
    """The seconds of a step from its making on, and the most memory that this process has held."""

    def __init__(self) -> None:
        self._started, self._began = time.process_time(), time.perf_counter()

    def took(self) -> dict[str, float]:
        step_s, wall_s = time.process_time() - self._started, time.perf_counter() - self._began
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"step_s": step_s, "wall_s": wall_s, "peak_bytes": peak_bytes}
