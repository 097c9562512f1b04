"""The work of whole steps on given responses, which both programs read: rows of English of spread lengths. Torch-free.

A step is one pass over all rows of a set, so that both programs do the same work in each, whatever their order and
their packing. Lengths in words are log-normal with a sigma of 1; most of them are far from the longest.
"""

import math
import random
import resource
from dataclasses import dataclass, field
from typing import Any

from tools.embedded import grammar

Row = dict[str, str]
SEQUENCES = 16  # of a step; a pair has two
MICRO_BATCH = 4  # sequences
MEDIAN, MOST_WORDS = 30.0, 160  # of a response
MOST_TOKENS = 256  # of a prompt and its response, and of a packed row of TRL's
LR = 1e-6


@dataclass(frozen=True, slots=True)
class GivenWork:
    """page: of ours; packs: whether TRL packs its rows; full: half as many rows, each with the most words; promised:
    least times faster. theirs: options of TRL's."""

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
        GivenWork("SFT", "sft", 1.5),
        GivenWork("SFT, TRL packs", "sft", 1.0, packs=True, theirs={"packing": True, "max_length": MOST_TOKENS}),
        GivenWork("reward model", "reward_model", 1.5),
        GivenWork("DPO", "dpo", 1.5),
    )
}


ADAPTED = {  # with adapters
    work.name: work for work in (WORKS["SFT"], GivenWork("SFT, full length", "sft", 1.0, full=True), WORKS["DPO"])
}


def rows_of(of: GivenWork) -> list[Row]:
    """The rows of a step."""
    draw, columns = random.Random(1), ("completion",) if of.page == "sft" else ("chosen", "rejected")
    num_rows = SEQUENCES // of.sequences_per_row // (2 if of.full else 1)
    return [
        {"prompt": grammar.opening(draw).text} | {column: _response(draw, full=of.full) for column in columns}
        for _ in range(num_rows)
    ]


def _response(draw: random.Random, *, full: bool) -> str:
    num_words = min(max(round(draw.lognormvariate(math.log(MEDIAN), 1.0)), 1), MOST_WORDS)
    num_words = MOST_WORDS if full else num_words
    words: list[str] = []
    while len(words) < num_words:
        words += "".join(grammar.scene(draw)).split()
    return " " + " ".join(words[:num_words])


def peak_bytes() -> int:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
