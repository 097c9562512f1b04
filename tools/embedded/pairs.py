"""Pairs of responses, of which a noisy annotator prefers one by the grammar's score."""

import math
import random
from collections.abc import Sequence

from tools.embedded import grammar

ANNOTATOR = 6.0  # P(a is preferred to b) = sigmoid(ANNOTATOR * (quality of a - quality of b))
CUT = 1.0  # is taken off the quality of a response that did not end, or that is damaged or off its subject
Candidate = tuple[str, float]  # a continuation and its quality


def quality(text: str, ended: bool) -> float:
    """Returns what the annotator looks at."""
    return grammar.score(text) - CUT * (not ended)


def ranked(rng: random.Random, prompt: str, a: Candidate, b: Candidate, annotator: float = ANNOTATOR) -> dict | None:
    """Returns a row for `reward_model` and `dpo`; None for two that are equally good, which the annotator leaves
    out."""
    if a[1] == b[1] or not a[0].strip() or not b[0].strip():
        return None
    chance = 1 / (1 + math.exp(-annotator * (a[1] - b[1])))
    chosen, rejected = (a, b) if rng.random() < chance else (b, a)
    return {"prompt": prompt, "chosen": chosen[0], "rejected": rejected[0]}


def pairs_of_samples(rows: Sequence[dict], seed: int) -> list[dict]:
    """Returns pairs of the samples in a file of `generate`: the first with the second of a prompt, the third with the
    fourth, and so on."""
    rng, found, waiting = random.Random(seed), [], {}
    for row in rows:
        one = row["response"], quality(row["response"], row["finish"] == "eos")
        other = waiting.pop(row["prompt"], None)
        if other is None:
            waiting[row["prompt"]] = one
        elif pair := ranked(rng, row["prompt"], other, one):
            found.append(pair)
    return found
