"""Pairs of responses, of which a noisy annotator prefers one by the grammar's score; and how a text is damaged."""

import math
import random
from collections.abc import Callable, Iterator, Sequence

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


def damaged(rng: random.Random, text: str) -> str:
    """Returns a worse text: words shuffled, one of them dropped or repeated, a sentence repeated, or the end cut
    off."""
    words = text.split()
    at = rng.randrange(len(words))
    way = rng.randrange(5)
    if way == 0:
        rng.shuffle(words)
    elif way == 1 and len(words) > 1:
        del words[at]
    elif way == 2:
        words[at:at] = [words[at]] * rng.randrange(1, 4)
    elif way == 3:
        words += rng.choice(text.strip().split(". ")).rstrip(".").split()
        words[-1] += "."
    else:
        words = words[: max(1, at)]
    return "".join(f" {word}" for word in words)


def mixed_pairs(
    rng: random.Random, starts: Sequence[grammar.Opening], samples: Sequence[Sequence[tuple[str, bool]]], num: int
) -> Iterator[dict]:
    """Yields pairs for a reward model that also judges whether a text is whole and stays on its subject: a continuation
    is a model's own (35%), the grammar's (35%), damaged (18%) or of another opening (12%).

    samples: two of each opening.
    """

    def candidate(at: int, which: int) -> Candidate:
        way = rng.random()
        if way < 0.35:
            text, ended = samples[which][at]
            return text, quality(text, ended)
        start = grammar.opening(rng) if way > 0.88 else starts[at]
        text = grammar.continuation(rng, start)
        if way >= 0.70:
            text = damaged(rng, text) if way < 0.88 else text
        return text, quality(text, way < 0.70)

    yield from _distinct(num, lambda: _drawn(rng, starts, candidate))


def _drawn(rng: random.Random, starts: Sequence[grammar.Opening], candidate: Callable) -> dict | None:
    at = rng.randrange(len(starts))
    return ranked(rng, starts[at].text, candidate(at, 0), candidate(at, 1))


def _distinct(num: int, draw: Callable[[], dict | None]) -> Iterator[dict]:
    """Draws so many rows that are not None."""
    while num:
        if row := draw():
            num -= 1
            yield row
