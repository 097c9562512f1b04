"""Coefficients, learning rates and running moments: they change between iterations or steps, by global numbers only.

No torch. Sources: [LM] Ziegler et al. 2019, arXiv 1909.08593.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

LARGEST_ERROR = 0.2  # of the controller, relative to its target


def next_kl_coef(
    kl_coef: float, mean_kl: float, num_sequences: float, *, target: float = 6.0, horizon: float = 10_000
) -> float:
    """Returns the coefficient for the next iteration ([LM] section 2.2).

    kl_coef <- kl_coef (1 + e n / horizon), e = clip(mean_kl / target - 1, -0.2, 0.2), with mean_kl the global mean over
    the iteration's n sequences of the *sum* of token_kl over a response. The coefficient stays positive if the horizon
    is at least `least_horizon`.
    """
    error = min(max(mean_kl / target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
    return kl_coef * (1.0 + error * num_sequences / horizon)


def least_horizon(num_sequences: int) -> int:
    """Returns the least horizon with 0.2 n / horizon < 1, for n sequences of an iteration."""
    return num_sequences // 5 + 1


def learning_rate(
    step: int,
    *,
    peak: float,
    num_warmup_steps: int = 0,
    num_steps: int = 0,
    decay: Literal["constant", "linear", "cosine"] = "constant",
    least: float = 0.0,
) -> float:
    """Returns the rate of optimizer step `step` = 0, 1, ...: peak (step + 1) / num_warmup_steps while that is below the
    peak, then constant, or decaying to peak * least at step `num_steps` along a line or half a cosine."""
    if step < num_warmup_steps:
        return peak * (step + 1) / num_warmup_steps
    if decay == "constant":
        return peak
    progress = min((step - num_warmup_steps) / max(num_steps - num_warmup_steps, 1), 1.0)
    left = {"linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}[decay]
    return peak * (least + (1.0 - least) * left)


def warmup_steps_of(ratio: float, num_steps: int) -> int:
    """Returns the number of warm-up steps that are this share of the steps of a run, rounded up. The share is taken as
    it is written, so 7% of 100 steps are 7."""
    return math.ceil(Fraction(repr(ratio)) * num_steps)


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Mean and variance of all scores so far, for score normalisation.

    Kept as (count, mean, sum of squared deviations) and merged by the formula of Chan, Golub and LeVeque (1983), so
    it does not lose digits over a long run.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """Population standard deviation; 1 while there is no spread to divide by, but that of rounding."""
        std = math.sqrt(self.squares / self.count) if self.count else 0.0
        return std if std > 1e-7 * abs(self.mean) else 1.0

    def updated(self, count: float, total: float, squares: float) -> "RunningMoments":
        """Returns the moments with the scores of one more iteration: their count, sum and sum of squares, all
        global."""
        if count == 0:
            return self
        mean = total / count
        variance = max(squares / count - mean * mean, 0.0)
        both, shift = self.count + count, mean - self.mean
        spread = self.squares + variance * count + shift * shift * self.count * count / both
        return RunningMoments(both, self.mean + shift * count / both, spread)
