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
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

from rlhf_spmd import embedded
from tools.embedded import grammar

GRPO = "GRPO"  # the name of its work, for workers
PROMPTS, SAMPLES = 4, 8
MICRO_BATCH = 8  # responses
LIMIT = 128  # tokens of a response; at full length each has as many
SPREAD_MEDIAN = 20.0  # of spread lengths
LR, KL = 1e-6, 0.04
LENGTHS = ("full length", "spread lengths")

SEQUENCES = 16  # of a step on given responses; a pair has two
GIVEN_MICRO_BATCH = 4  # sequences
MEDIAN, MOST_WORDS = 30.0, 160  # of a given response
MOST_TOKENS = 256  # of a prompt and its response, and of a packed row of TRL's


# ---- GRPO -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Told:
    """One step. lengths: tokens of each response that is generated, in the order of rows; checkpointing: TRL's, of
    activations."""

    lengths: list[int]
    checkpointing: bool = False


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


def reward(text: str) -> float:
    """Returns a reward that is cheap, and different for most responses."""
    return text.count("e") / 10


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


def commands(kind: Callable[..., Any] = Told) -> tuple[Iterator[Any], TextIO]:
    """Returns a worker's commands, and where its answers go; whatever else the process prints goes to its stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    return (kind(**json.loads(line)) for line in sys.stdin), answers


def answer(to: TextIO, **found) -> None:
    to.write(json.dumps(found) + "\n")


class Step:
    """The seconds of a step from its making on, and the most memory that this process has held."""

    def __init__(self) -> None:
        self._started, self._began = time.process_time(), time.perf_counter()

    def took(self) -> dict[str, float]:
        step_s, wall_s = time.process_time() - self._started, time.perf_counter() - self._began
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"step_s": step_s, "wall_s": wall_s, "peak_bytes": peak_bytes}
