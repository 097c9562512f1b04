"""How many tokens a second rows make whose tools only sleep, against the same rows without waiting?

A random Llama of about a million parameters draws episodes of four turns of 32 tokens in the mean, each answered by
eight tokens. A trace of tool times has a median of 20 decode steps and a 95th percentile of 400 (lognormal, cut at 800
steps as a time limit of tools would); a step is that of 64 rows without waits, measured in the same repeat. Both ways
take turns. Without waits 64 rows are in flight. With them a row that waits keeps its place, so there may be more.
Cases: 64 rows alone, where the row that waits longest decides the end; and 512 rows in 64 and in 256 places.

Seconds are those of the one thread's processor, and a sleep with nothing to do is skipped and counted: so other work on
the machine hardly matters.

Cost: three minutes of a processor. Command: python -m bench tool-waits [--repeats N]
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
from bench.tables import ended
from rlhf_spmd.kernels.philox import random_bits
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.workload import ModelShape
from rlhf_spmd.runtime.generation.engine import Engine
from rlhf_spmd.runtime.generation.episodes import Answer, Turns
from rlhf_spmd.runtime.generation.random_streams import OFFLINE
from rlhf_spmd.runtime.generation.requests import Sampling

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
    bits_RG = torch.from_numpy(random_bits(0, OFFLINE, 0, range(num_rows), [0] * num_rows, WIDTH))
    prompts = [[1 + (7 * row + place) % (vocabulary - 2) for place in range(PROMPT)] for row in range(num_rows)]
    engine.submit(prompts, bits_RG, Sampling(WIDTH))
    rounds: list[tuple[float, int]] = []
    began_s = tools.now_s()
    engine.run(progress=lambda _, num: rounds.append((tools.now_s() - began_s, num)))
    totals = np.cumsum([num for _, num in rounds])
    ends = [int(np.searchsorted(totals, part * totals[-1])) for part in PARTS]
    return [rounds[end][0] for end in ends], int(totals[-1]), len(rounds)


def measure(model: Transformer, repeats: int) -> list[dict]:
    """Measures a row for each case."""
    shares: dict[tuple[int, int], list[list[float]]] = {case: [] for case in CASES}
    rates: dict[tuple[int, int], list[float]] = {case: [] for case in CASES}
    for repeat in range(repeats + 1):  # the first one warms up
        plain: dict[int, tuple[list[float], int]] = {}
        for case in CASES if repeat else CASES[:1]:
            num_rows, places = case
            if num_rows not in plain:
                plain_s, tokens, rounds = run(model, num_rows, RUNNING, np.zeros((num_rows, NUM_TURNS)))
                plain[num_rows], step_s = (plain_s, tokens), plain_s[-1] / rounds
            plain_s, tokens = plain[num_rows]
            waited_s, same, _ = run(model, num_rows, places, trace(num_rows) * step_s)
            assert same == tokens, "waits change tokens"
            if repeat:
                shares[case].append([one / other for one, other in zip(plain_s, waited_s, strict=True)])
                rates[case].append(tokens / plain_s[-1])
    rows = []
    for (num_rows, places), found in shares.items():
        middle = [statistics.median(values) for values in zip(*found, strict=True)]
        named = {f"share_{round(100 * part)}": share for part, share in zip(PARTS, middle, strict=True)}
        rate = statistics.median(rates[num_rows, places])
        rows.append({"rows": num_rows, "places": places, "plain_tokens_per_s": rate, **named, "repeats": repeats})
    return rows


def main(arguments: list[str]) -> int:
    parser = Arguments("tool-waits", __doc__)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    peers.use_fastest(torch.float32)
    theirs = peers.random_model(SHAPE, torch.float32, torch.device("cpu"))
    rows = measure(peers.same_weights(theirs, torch.float32), parsed.repeats)
    write("tool_waits", rows)
    best = max(row["share_100"] for row in rows)
    return ended("tool-waits", rows, ok=best >= LEAST, share=best)
