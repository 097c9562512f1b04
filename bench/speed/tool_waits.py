"""How many tokens a second rows make whose tools only sleep, against the same rows without waiting?

A random Llama of about a million parameters draws episodes of four turns of 32 tokens in the mean, each answered by
eight tokens. A trace of tool times has a median of 20 decode steps and a 95th percentile of 400 (lognormal, cut at 800
steps as a time limit of tools would); a step is that of 64 rows without waits, measured in the same repeat. Both ways
take turns. Without waits 64 rows are in flight. With them a row that waits keeps its place, so there may be more.
Cases: 64 rows alone, where the row that waits longest decides the end; and 512 rows in 64 and in 256 places.

Seconds are those of the one thread's processor, and a sleep with nothing to do is skipped and counted: so other work on
the machine hardly matters.

Cost: four minutes of a processor. Command: python -m bench tool-waits
"""

import heapq
import math
import statistics
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from bench.rows import Arguments, write
from bench.speed import generate_peers as peers
from bench.speed.requests import submit
from bench.tables import ended
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.workload import ModelShape
from rlhf_spmd.runtime.generation.engine import Engine
from rlhf_spmd.runtime.generation.episodes import Answer, Turns

SHAPE = ModelShape(4, 128, 352, 4, 2, 32, 512, tied=True)
NUM_TURNS, TURN, ANSWER, PROMPT = 4, 32, tuple(range(100, 108)), 16  # tokens
WIDTH = 3 * NUM_TURNS * TURN
MEDIAN, P95, LONGEST = 20.0, 400.0, 800.0  # decode steps
RUNNING = 64
CASES = ((64, 64), (512, 64), (512, 256))  # rows, places
PARTS = (0.5, 0.8, 1.0)  # of the tokens
LEAST = 0.8  # promised, of the tokens per second without waits
REPEATS = 2


@dataclass(slots=True)
class Sleeping:
    """Tools that only sleep.

    wait_s: seconds of each call of each row.
    """

    wait_s: np.ndarray
    calls: dict[int, int] = field(default_factory=dict)
    waiting: list[tuple[float, int, Answer]] = field(default_factory=list)  # a heap by the time of the answer
    skipped_s: float = 0.0

    def now_s(self) -> float:
        return time.thread_time() + self.skipped_s

    def drew(self, row: int, token_ids: list[int]) -> None:
        call = self.calls[row] = self.calls.get(row, 0) + 1
        answer = Answer(row, None, "completed") if call == NUM_TURNS else Answer(row, ANSWER)
        wait_s = 0.0 if call == NUM_TURNS else float(self.wait_s[row, call - 1])
        heapq.heappush(self.waiting, (self.now_s() + wait_s, row, answer))

    def answers(self, wait_s: float) -> list[Answer]:
        if wait_s and self.waiting:
            self.skipped_s += max(0.0, self.waiting[0][0] - self.now_s())
        found = []
        while self.waiting and self.waiting[0][0] <= self.now_s():
            found.append(heapq.heappop(self.waiting)[2])
        return found


def trace(num_rows: int) -> np.ndarray:
    """Returns tool times in decode steps, the same ones every time."""
    sigma = math.log(P95 / MEDIAN) / statistics.NormalDist().inv_cdf(0.95)
    drawn = np.random.default_rng(0).standard_normal((num_rows, NUM_TURNS))
    return np.minimum(MEDIAN * np.exp(sigma * drawn), LONGEST)


def run(model: Transformer, num_rows: int, places: int, wait_s: np.ndarray) -> tuple[list[float], int, int]:
    """Runs the engine. Returns seconds in which each of PARTS of the tokens was drawn, tokens, rounds."""
    tools = Sleeping(wait_s)
    turns = Turns(tools, WIDTH, WIDTH)
    vocabulary = model.config.vocab_size
    eos_ids = range(0, vocabulary, TURN)  # so that a turn has TURN tokens in the mean
    engine = Engine(model, longest=PROMPT + WIDTH, eos_ids=eos_ids, turns=turns, max_sequences=places)
    prompts = [[1 + (7 * row + place) % (vocabulary - 2) for place in range(PROMPT)] for row in range(num_rows)]
    submit(engine, prompts, [WIDTH] * num_rows)
    rounds: list[tuple[float, int]] = []
    began_s = tools.now_s()
    engine.run(progress=lambda _, num: rounds.append((tools.now_s() - began_s, num)))
    totals = np.cumsum([num for _, num in rounds])
    ends = [int(np.searchsorted(totals, part * totals[-1])) for part in PARTS]
    return [rounds[end][0] for end in ends], int(totals[-1]), len(rounds)


def measure(model: Transformer, num_rows: int, places: int) -> dict:
    """Measures the row of a case."""
    shares, rates = [], []
    for _ in range(REPEATS):
        plain_s, tokens, rounds = run(model, num_rows, RUNNING, np.zeros((num_rows, NUM_TURNS)))
        waited_s, same, _ = run(model, num_rows, places, trace(num_rows) * plain_s[-1] / rounds)
        assert same == tokens, "waits change tokens"
        shares.append([one / other for one, other in zip(plain_s, waited_s, strict=True)])
        rates.append(tokens / plain_s[-1])
    row = {"rows": num_rows, "places": places, "plain_tokens_per_s": statistics.median(rates)}
    middle = map(statistics.median, zip(*shares, strict=True))
    named = {f"share_{round(100 * part)}": share for part, share in zip(PARTS, middle, strict=True)}
    return row | named | {"repeats": REPEATS}


def main(arguments: list[str]) -> int:
    Arguments("tool-waits", __doc__).parse_args(arguments)
    torch.set_num_threads(1)
    peers.use_fastest(torch.float32)
    theirs = peers.random_model(SHAPE, torch.float32, torch.device("cpu"))
    model = peers.same_weights(theirs, torch.float32)
    _, *rows = (measure(model, *case) for case in (CASES[0], *CASES))  # the first one warms up
    write("tool_waits", rows)
    best = max(row["share_100"] for row in rows)
    return ended("tool-waits", rows, ok=best >= LEAST, share=best)
