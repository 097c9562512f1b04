"""How long responses are: their distribution, the longest of some rows, and the decode steps of rows that take turns.

A distribution is its survival function S(x) = P(length > x) on a fixed grid, so every expectation is a sum over the
grid and the same each time; nothing is sampled. E[length] = sum of S, and E[longest of n] = sum of 1 - (1 - S)^n.

An engine with k slots decodes n > k rows: when a row ends, the next takes its slot. Each slot is a renewal process
(Feller, An Introduction to Probability Theory, volume 2, chapter XI). With f the mass function of lengths, rows start
in a slot with u(t) = sum_j f(j) u(t - j), u(0) = 1, until the k slots have started n rows at the time T. Rows that
started at s are active at t with S(t - s), so of the expected rows at T + d, A(d) = k sum_(s <= T) u(s) S(T + d - s),
one has just started, and the others end independently: the last row has ended with the probability

    (1 - S(d)) (1 - r(d))^(A(0) - 1),  r(d) = (A(d) - S(d)) / (A(0) - 1).

T is what makes the rows' tokens n E[length]. This is exact for n <= k, for k = 1 and for rows of one length; elsewhere
the error is small beside what iterations differ by (a test compares with rows that are sampled).

Data-parallel shards wait for the slowest of D: with F(d) the probability above, all have ended with F(d)^D, where the
time at which a shard starts its last rows differs from T by a normal variable, variance (n - k) Var[length] / k^2.
A pass takes as long as its tokens, which are packed, without padding: the largest of D sums of n lengths, whose
distribution is the n-th convolution power of that of a length. A token's attention sees half of E[length^2] /
E[length] tokens.
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
SUM_CELLS = 1 << 16  # of the grid of a sum, at most
NORMAL = np.linspace(-5, 5, 101)  # points of a normal variable
WEIGHTS = np.exp(-(NORMAL**2) / 2) / np.exp(-(NORMAL**2) / 2).sum()


@dataclass(frozen=True, eq=False)
class LengthDistribution:
    """A distribution of lengths in tokens. step: tokens of a cell of the grid; survival: P(length > i * step) for the
    cells i from 0 on: 1 in the first one, 0 after the last one."""

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

    @cached_property
    def variance(self) -> float:
        """The variance of the tokens of a response."""
        return self.mean * (2 * self.middle - self.mean)

    @property
    def limit(self) -> float:
        """The tokens of the longest response that can be."""
        return self.step * len(self.survival)

    def longest(self, num_rows: int) -> float:
        """Returns the expected tokens of the longest of some responses."""
        return self.step * float(_any_of(self.survival, num_rows).sum())

    @lru_cache(maxsize=4096)  # noqa: B019  of_forecast keeps the distributions, too
    def surplus(self, num_rows: int, num_shards: int) -> float:
        """Returns the expected tokens by which the largest of some sums of so many lengths exceeds their mean."""
        if len(self.survival) == 1 or num_shards < 2 or not num_rows:
            return 0.0
        size = -(-num_rows * len(self.survival) // SUM_CELLS)  # cells that become one
        padded = np.pad(self.survival, (0, -len(self.survival) % size))
        survival = padded.reshape(-1, size).mean(1)
        mass = -np.diff(survival, prepend=1.0, append=0.0)
        cells = num_rows * len(survival) + 1
        of_sum = np.fft.irfft(np.fft.rfft(mass, 2 * cells) ** num_rows, 2 * cells)[:cells]
        below = np.clip(np.cumsum(of_sum), 0.0, 1.0)
        return self.step * size * float((below - below**num_shards).sum())


@dataclass(frozen=True)
class Decoding:
    """The decode steps of some rows.

    steps: expected until the last row has ended.
    phases: how many steps have how many active rows, of which the expected tokens are the sum of products.
    begins, ends: steps after which rows begin in the slots of others, or end.
    """

    steps: float
    phases: tuple[tuple[float, float], ...]
    begins: float = 0.0
    ends: float = 0.0

    @property
    def tokens(self) -> float:
        """The expected tokens of all rows of a shard."""
        return sum(steps * rows for steps, rows in self.phases)


def constant(length: float) -> LengthDistribution:
    """Returns responses of one length."""
    return LengthDistribution(float(length), np.ones(1))


def lognormal(mean: float, sigma: float, limit: float) -> LengthDistribution:
    """Returns responses whose logarithms are normal with the standard deviation sigma, but that are cut at a limit.
    mean: of the responses as they are, after the cut. Raises UserError for a mean that no such responses have."""
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
    far = low + (5 + sigma) * sigma  # beyond it, nothing counts
    most = math.exp(far) if far < math.log(limit) else limit
    cells = min(CELLS, math.ceil(most))
    step = most / cells
    survival = np.array([_above(math.log((cell + 0.5) * step), low, sigma) for cell in range(cells)])
    survival[0] = 1.0  # a response has a token
    return LengthDistribution(mean / float(survival.sum()), survival)


def of_rows(lengths: Sequence[int]) -> LengthDistribution:
    """Returns the distribution of responses that were made, all equally frequent. Raises UserError if there is none."""
    if not lengths or min(lengths) < 1:
        raise UserError("there is no response to take lengths from; give a run with rollouts")
    values = np.sort(np.asarray(lengths, dtype=np.float64))
    cells = min(CELLS, int(values[-1]))
    edges = np.arange(cells) * (values[-1] / cells)
    survival = 1.0 - np.searchsorted(values, edges, side="right") / len(values)
    return LengthDistribution(float(values.mean() / survival.sum()), survival)


@lru_cache
def of_forecast(responses: ResponseLengths, limit: int, begun: int = 0) -> LengthDistribution:
    """Returns the distribution of responses that forecasts assume, at most `limit` tokens. begun: tokens of each
    response that are made before its first decode step. Raises UserError as lognormal does."""
    if responses.rows:
        return of_rows([max(1, min(length, limit) - begun) for length in responses.rows])
    if not begun or responses.mean <= begun:
        return lognormal(responses.mean - begun, responses.sigma, limit - begun)
    return _rest(lognormal(responses.mean, responses.sigma, limit), begun)


def _rest(lengths: LengthDistribution, begun: int) -> LengthDistribution:
    """Returns the remaining lengths of responses of so many tokens: one token at least, and the mean is exact."""
    if len(lengths.survival) == 1:
        return constant(lengths.mean - begun)
    cells = np.arange(len(lengths.survival)) * lengths.step
    later = cells[cells + begun < lengths.limit - SMALL] + begun
    survival = np.interp(later, cells, lengths.survival)
    survival[0] = 1.0
    return LengthDistribution((lengths.mean - begun) / float(survival.sum()), survival)


@lru_cache
def of_sequences(responses: ResponseLengths, limit: int) -> LengthDistribution:
    """Returns what differs between sequences: the tokens of prompt and response, or of the response if all prompts have
    as many."""
    if responses.prompts:
        rows = zip(responses.prompts, responses.rows, strict=True)
        return of_rows([prompt + min(response, limit) for prompt, response in rows])
    return of_forecast(responses, limit)


@lru_cache(maxsize=4096)
def decode(lengths: LengthDistribution, num_rows: int, places: int, num_shards: int = 1) -> Decoding:
    """Returns the expected decode steps of some rows in so many slots at most, of the slowest of some shards that each
    have such rows."""
    places = min(places, num_rows)
    if not places:
        return Decoding(0.0, ())
    survival, step = lengths.survival, lengths.step
    starts, begins, cells = _starts(survival, num_rows / places, places, step)
    started = places * starts
    active = np.convolve(started, survival)[len(survival) - 1 :]  # A(0), A(1) ...
    others = np.minimum.accumulate(np.maximum(active - survival, 0.0))
    number, active = float(others[0]), survival + others
    later = cells + 1 + np.arange(len(active))
    ends = begins + float(_hit(-np.diff(active, append=0.0) / places, _cut(survival, later), places, step).sum())
    ended = 1.0 - survival
    if number > 0:
        ended = ended * (1.0 - _any_of(others / number, number))
    phases: list[tuple[float, float]] = []
    if num_rows > places:
        full = step * (num_rows * float(survival.sum()) - float(active.sum())) / places
        late = math.sqrt((num_rows - places) * lengths.variance) / places / step
        phases = [(full + step * _later(ended, late, num_shards), float(places))]
    cuts = np.flatnonzero(np.diff(np.floor(active / active[0] * PHASES))) + 1
    for some, chance in zip(np.split(active, cuts), np.split(1.0 - ended**num_shards, cuts), strict=True):
        if steps := step * float(chance.sum()):
            phases.append((steps, step * float(some.sum()) / steps))
    return Decoding(sum(steps for steps, _ in phases), tuple(phases), begins, ends)


def slowest(
    lengths: LengthDistribution, mean: float, num_rows: int, num_shards: int, num_passes: int = 1, pp: int = 1
) -> float:
    """Returns the expected seconds of the passes of the slowest of some shards over those of a shard of mean lengths.

    mean: tokens of a sequence.
    num_rows: sequences of a shard.
    num_passes: number of passes that they are cut into.
    pp: stages, for which the longest pass counts pp - 1 more times.
    """
    if not num_rows:
        return 1.0
    most = lengths.surplus(num_rows, num_shards)
    if pp > 1:
        most += (pp - 1) * lengths.surplus(max(1, num_rows // num_passes), num_passes)
    return 1.0 + most / (mean * num_rows * (1 + (pp - 1) / num_passes))


def mean_of_cut_lognormal(mu: float, sigma: float, limit: float) -> float:
    """Returns E[min(X, limit)] of a lognormal X: exp(mu + sigma^2 / 2) Phi(z - sigma) + limit (1 - Phi(z)) with z =
    (log limit - mu) / sigma."""
    above = _above(math.log(limit), mu, sigma)
    below = 1.0 - _above(math.log(limit), mu + sigma**2, sigma)
    return (math.exp(mu + sigma**2 / 2) * below if below else 0.0) + limit * above


def _above(x: float, mu: float, sigma: float) -> float:
    """Returns P(Y > x) of a normal Y."""
    return 0.5 * math.erfc((x - mu) / (sigma * math.sqrt(2)))


def _any_of(chance: np.ndarray, number: float) -> np.ndarray:
    """Returns the chance that at least one of some events happens, which are independent and alike."""
    with np.errstate(divide="ignore"):
        none: np.ndarray = np.exp(number * np.log1p(-np.minimum(chance, 1.0)))
    return 1.0 - none


def _later(ended: np.ndarray, deviation: float, num_shards: int) -> float:
    """Returns the expected cells by which the last of some shards ends later because each one's clock is off by a
    normal variable.

    ended: the chance that a shard has ended by each cell of its clock.
    """
    if num_shards < 2 or deviation <= SMALL:
        return 0.0
    cells = np.arange(-1, len(ended) + 1)
    known = np.concatenate([[0.0], ended, [1.0]])
    low, high = NORMAL[0] * deviation - 1, len(ended) + NORMAL[-1] * deviation
    points, width = np.linspace(low, high, CELLS, retstep=True)
    one = sum(w * np.interp(points - z * deviation, cells, known) for z, w in zip(NORMAL, WEIGHTS, strict=True))
    alone = np.interp(points, cells, known)
    return float(width * (alone**num_shards - one**num_shards).sum())


def _starts(survival: np.ndarray, rows: float, places: int, step: float) -> tuple[np.ndarray, float, int]:
    """Returns the rows that one place starts in each cell, up to that in which it has started so many in all, and in as
    many cells as a row can last; in how many steps after the first some of all slots start one; and that cell. Once
    starts have settled at 1 / mean a cell, cells are skipped."""
    mass, size = -np.diff(survival, append=0.0)[::-1], len(survival)  # f of the longest ... f(1)
    settled = 1.0 / float(survival.sum())
    starts, at, done, cells, hit = np.zeros(2 * size), size, 1.0, 0, 0.0
    starts[size - 1] = done

    def hit_in(chances: np.ndarray, end: int) -> float:
        together = _cut(survival, np.arange(end - len(chances), end) + 1)
        return float(_hit(chances, together, places, step).sum())

    while rows - done > SMALL * rows:
        if at == 2 * size:
            hit += hit_in(starts[size:], cells)
            starts[:size], at = starts[size:], size
            if abs(starts[:size] - settled).max() < SETTLED * settled:
                skipped = max(0, int((rows - done) / settled) - 1)
                done, cells = done + skipped * settled, cells + skipped
                hit += skipped * hit_in(np.array([settled]), cells)
        starts[at] = min(float(mass @ starts[at - size : at]), rows - done)
        done, at, cells = done + float(starts[at]), at + 1, cells + 1
    return starts[at - size : at], hit + hit_in(starts[size:at], cells), cells


def _cut(survival: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Returns the chance that in a cell a slot ends a row that is cut at the limit, as all its earlier ones were: such
    rows of all slots end in one step."""
    number, rest = np.divmod(cells, len(survival))
    return np.where(rest == 0, survival[-1] ** number, 0.0)


def _hit(chances: np.ndarray, together: np.ndarray | float, places: int, step: float) -> np.ndarray:
    """Returns the expected steps of each cell in which something happens in one of some slots.

    chances: that it happens in a slot, in some step of the cell.
    together: that it does so in one step for all slots.
    """
    width = max(step, 1.0)
    at_once = _any_of(np.asarray(together), places)
    apart = _any_of(np.maximum(chances - together, 0.0) / width, places)
    steps: np.ndarray = np.minimum(at_once + width * apart - at_once * apart, places * chances)
    return steps
