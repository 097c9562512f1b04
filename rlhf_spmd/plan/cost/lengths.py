"""How long responses are: their distribution, the longest of some rows, and the decode steps of rows that take turns.

A distribution is its survival function S(x) = P(length > x) on a fixed grid, so every expectation is a sum over the
grid and the same each time; nothing is drawn. E[length] = sum of S, and E[longest of n] = sum of 1 - (1 - S)^n.

An engine with k places decodes n > k rows: when a row ends, the next takes its place. Each place is a renewal process
(Feller, An Introduction to Probability Theory, volume 2, chapter XI). With f the mass function of lengths, rows start
in a place with u(t) = sum_j f(j) u(t - j), u(0) = 1, until the k places have started n rows at the time T. Rows that
started at s are active at t with S(t - s), so of the expected rows at T + d, A(d) = k sum_(s <= T) u(s) S(T + d - s),
one has just started, and the others end independently: the last row has ended with the probability

    (1 - S(d)) (1 - r(d))^(A(0) - 1),  r(d) = (A(d) - S(d)) / (A(0) - 1).

T is what makes the rows' tokens n E[length]. This is exact for n <= k, for k = 1 and for rows of one length; elsewhere
the error is small beside what iterations differ by (a test compares with rows that are drawn).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.workload import ResponseLengths

CELLS = 1024  # of a grid, at most
SETTLED = 1e-6  # how far starts per cell may be from their limit, relatively
SMALL = 1e-9  # of all rows: what is left by rounding
PHASES = 32  # into which the end of a round of decoding is cut


@dataclass(frozen=True, eq=False)
class LengthDistribution:
    """A distribution of lengths in tokens. step: tokens of a cell of the grid; survival: P(length > i * step) for the
    cells i from 0 on: 1 in the first one, 0 behind the last one."""

    step: float
    survival: np.ndarray

    @cached_property
    def mean(self) -> float:
        """The expected tokens of a response."""
        return self.step * float(self.survival.sum())

    @cached_property
    def middle(self) -> float:
        """The expected tokens before a token of a response, itself counted by half: E[length^2] / (2 E[length])."""
        cells = np.arange(len(self.survival)) + 0.5
        return self.step * float((cells * self.survival).sum() / self.survival.sum())

    @property
    def limit(self) -> float:
        """The tokens of the longest response that can be."""
        return self.step * len(self.survival)

    def longest(self, num_rows: int) -> float:
        """The expected tokens of the longest of some responses."""
        return self.step * float(_any_of(self.survival, num_rows).sum())


@dataclass(frozen=True)
class Decoding:
    """The decode steps of some rows. steps: expected until the last row has ended; phases: how many steps have how many
    active rows, of which the expected tokens are the sum of products."""

    steps: float
    phases: tuple[tuple[float, float], ...]

    @property
    def tokens(self) -> float:
        """The expected tokens of all rows."""
        return sum(steps * rows for steps, rows in self.phases)


def constant(length: float) -> LengthDistribution:
    """Responses of one length."""
    return LengthDistribution(float(length), np.ones(1))


def lognormal(mean: float, sigma: float, limit: float) -> LengthDistribution:
    """Responses whose logarithms are normal with the standard deviation sigma, but that are cut at a limit. mean: of
    the responses as they are, after the cut. Raises UserError for a mean that no such responses have."""
    if not (0 < mean <= limit and sigma >= 0 and math.isfinite(mean + sigma)):
        raise UserError(
            f"there are no responses of {mean:g} tokens in the mean, with sigma {sigma:g} and at most {limit:g} "
            "tokens; give a mean above 0 and up to the limit, and a sigma of at least 0"
        )
    if sigma == 0 or mean == limit:
        return constant(mean)
    low, high = math.log(mean) - 1.0, math.log(limit) + 40.0 * sigma + 1.0  # of the mean of the logarithm
    low -= sigma**2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_of_cut_lognormal(middle, sigma, limit) < mean else (low, middle)
    cells = min(CELLS, math.ceil(limit))
    step = limit / cells
    survival = np.array([_above(math.log((cell + 0.5) * step), low, sigma) for cell in range(cells)])
    survival[0] = 1.0  # a response has a token
    return LengthDistribution(mean / float(survival.sum()), survival)


def of_rows(lengths: Sequence[int]) -> LengthDistribution:
    """The distribution of responses that were made, all equally frequent. Raises UserError if there is none."""
    if not lengths or min(lengths) < 1:
        raise UserError("there is no response to take lengths from; give a run with rollouts")
    values = np.sort(np.asarray(lengths, dtype=np.float64))
    cells = min(CELLS, int(values[-1]))
    edges = np.arange(cells) * (values[-1] / cells)
    survival = 1.0 - np.searchsorted(values, edges, side="right") / len(values)
    return LengthDistribution(float(values.mean() / survival.sum()), survival)


@lru_cache
def of_forecast(responses: ResponseLengths, limit: int, begun: int = 0) -> LengthDistribution:
    """The distribution that forecasts assume, at most `limit` tokens. begun: tokens of each response that are made
    before its first decode step. Raises UserError as lognormal does."""
    if responses.rows:
        return of_rows([max(1, min(length, limit) - begun) for length in responses.rows])
    return lognormal(responses.mean - begun, responses.sigma, limit - begun)


@lru_cache(maxsize=4096)
def decode(lengths: LengthDistribution, num_rows: int, places: int) -> Decoding:
    """The expected decode steps of some rows in so many places at most."""
    places = min(places, num_rows)
    if not places:
        return Decoding(0.0, ())
    survival, step = lengths.survival, lengths.step
    started = places * _starts(survival, num_rows / places)
    active = np.convolve(started, survival)[len(survival) - 1 :]  # A(0), A(1) ...
    others = np.minimum.accumulate(np.maximum(active - survival, 0.0))
    number, active = float(others[0]), survival + others
    ended = 1.0 - survival
    if number > 0:
        ended = ended * (1.0 - _any_of(others / number, number))
    phases: list[tuple[float, float]] = []
    if num_rows > places:
        phases = [(step * (num_rows * float(survival.sum()) - float(active.sum())) / places, float(places))]
    cuts = np.flatnonzero(np.diff(np.floor(active / active[0] * PHASES))) + 1
    for some, chance in zip(np.split(active, cuts), np.split(1.0 - ended, cuts), strict=True):
        if steps := step * float(chance.sum()):
            phases.append((steps, step * float(some.sum()) / steps))
    return Decoding(sum(steps for steps, _ in phases), tuple(phases))


def meetings(lengths: LengthDistribution, num_rows: int, places: int) -> tuple[float, float]:
    """How often rows end, and how often others then begin. Rows that began together and are cut at the limit end
    together; all others end and begin alone."""
    together, left = float(min(num_rows, places)), float(num_rows)
    ends, begins, cut = left, left - together, float(lengths.survival[-1])
    first = True
    while together > 1 and left > 0:
        now = min(together, left)
        left, together = left - now, now * cut
        ends -= max(0.0, together - 1)
        begins -= 0.0 if first else now - 1
        first = False
    return ends, begins


def mean_of_cut_lognormal(mu: float, sigma: float, limit: float) -> float:
    """E[min(X, limit)] of a lognormal X: exp(mu + sigma^2 / 2) Phi(z - sigma) + limit (1 - Phi(z)) with
    z = (log limit - mu) / sigma."""
    above = _above(math.log(limit), mu, sigma)
    below = 1.0 - _above(math.log(limit), mu + sigma**2, sigma)
    return (math.exp(mu + sigma**2 / 2) * below if below else 0.0) + limit * above


def _above(x: float, mu: float, sigma: float) -> float:
    """P(Y > x) of a normal Y."""
    return 0.5 * math.erfc((x - mu) / (sigma * math.sqrt(2)))


def _any_of(chance: np.ndarray, number: float) -> np.ndarray:
    """The chance that at least one of some events happens, which are independent and alike."""
    with np.errstate(divide="ignore"):
        none: np.ndarray = np.exp(number * np.log1p(-np.minimum(chance, 1.0)))
    return 1.0 - none


def _starts(survival: np.ndarray, rows: float) -> np.ndarray:
    """The rows that one place starts in each cell, up to that in which it has started so many in all, and in as many
    cells as a row can last. Once starts have settled at 1 / mean a cell, cells are skipped."""
    mass, size = -np.diff(survival, append=0.0)[::-1], len(survival)  # f of the longest ... f(1)
    settled = 1.0 / float(survival.sum())
    starts, at, done = np.zeros(2 * size), size, 1.0
    starts[size - 1] = done
    while rows - done > SMALL * rows:
        if at == 2 * size:
            starts[:size], at = starts[size:], size
            if abs(starts[:size] - settled).max() < SETTLED * settled:
                done += max(0, int((rows - done) / settled) - 1) * settled
        starts[at] = min(float(mass @ starts[at - size : at]), rows - done)
        done, at = done + float(starts[at]), at + 1
    return starts[at - size : at]
