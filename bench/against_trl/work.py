"""The work of whole steps, which both programs read: prompts, reward, lengths of responses, and the talk with a worker.

A worker is a process of one thread that makes one step for each line of JSON that it reads, and answers with a line.
Torch-free. Seconds are a processor's (`time.process_time`): on an idle machine those of the clock, and on a busy one
without the time that others take.
"""

import json
import math
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

PROMPTS, SAMPLES = 4, 8
MICRO_BATCH = 8  # responses
LIMIT = 128  # tokens of a response; at full length each has as many
SPREAD_MEDIAN = 20.0  # of spread lengths
LR, KL = 1e-6, 0.04
WORKS = ("full length", "spread lengths")


@dataclass(frozen=True, slots=True)
class Told:
    """One step. lengths: tokens of each response, in the order of rows; checkpointing: TRL's, of activations."""

    lengths: list[int]
    checkpointing: bool = True


def lengths_of(work: str, step: int) -> list[int]:
    """Of the responses of a step: all to the limit, or log-normal with a sigma of 1, most of them far from it."""
    num = PROMPTS * SAMPLES
    if work == "full length":
        return [LIMIT] * num
    draw = random.Random(step)
    return [min(max(round(draw.lognormvariate(math.log(SPREAD_MEDIAN), 1.0)), 1), LIMIT) for _ in range(num)]


def reward(text: str) -> float:
    """Cheap, and different for most responses."""
    return text.count("e") / 10


def commands(kind: Callable[..., Any] = Told) -> tuple[Iterator[Any], TextIO]:
    """A worker's commands, and where its answers go; whatever else the process prints goes to its stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    return (kind(**json.loads(line)) for line in sys.stdin), answers


def answer(to: TextIO, **found) -> None:
    to.write(json.dumps(found) + "\n")
