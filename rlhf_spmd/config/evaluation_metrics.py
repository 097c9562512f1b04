"""Metrics of an evaluation: pure functions of the scores of several responses to each prompt.

`mean@1` is of the score that training uses. If that is a sum, each reward function has metrics of its own, such as
`right/mean@1`.
"""

from collections.abc import Mapping, Sequence
from math import comb, fsum
from typing import Any

PASS = "pass@"
STANDARD_ERROR = "standard_error"  # of mean@n, over prompts


def metric_names(num_samples: int, functions: Sequence[str] = (), *, passes: bool = True) -> list[str]:
    """Returns the metrics of an evaluation with so many responses to each prompt.

    functions: that have metrics of their own.
    passes: pass@k as well.
    """
    best = [f"best@{num_samples}"] if num_samples > 1 else []
    names = [f"mean@{num_samples}", *best, *(f"{PASS}{k}" for k in _numbers(num_samples) if passes)]
    return [*names, *(f"{function}/{name}" for function in functions for name in names)]


def measure(scores: Sequence[Sequence[float]], right_at: float) -> dict[str, float]:
    """Returns the metrics of `metric_names` for the scores [prompts][samples]: means over prompts of the mean score, of
    the best score, and of the chance that one of k responses is right, that is, has at least the score `right_at`. A
    response whose score is NaN has none: it is not right, and counts nowhere else."""
    num_samples = len(scores[0])
    known = [[score for score in row if score == score] for row in scores]
    values = [(fsum(row) / len(row), max(row), sum(score >= right_at for score in row)) for row in known]
    metrics = {f"mean@{num_samples}": _mean([mean for mean, _, _ in values])}
    if num_samples > 1:
        metrics[f"best@{num_samples}"] = _mean([best for _, best, _ in values])
    for k in _numbers(num_samples):
        metrics[f"{PASS}{k}"] = _mean([pass_at(k, num_samples, right) for _, _, right in values])
    return metrics


def measure_by_source(scores: Sequence[Sequence[float]], sources: Sequence[str], right_at: float) -> dict[str, float]:
    """Returns the metrics of `measure` over all prompts and, if they have different sources, over those of each:
    `mean@1/SOURCE`."""
    metrics, groups = measure(scores, right_at), dict[str, list[Sequence[float]]]()
    for row, source in zip(scores, sources, strict=True):
        groups.setdefault(source, []).append(row)
    for source in sorted(groups) if len(groups) > 1 else ():
        metrics |= {f"{name}/{source}": value for name, value in measure(groups[source], right_at).items()}
    return metrics


def pass_at(k: int, num_samples: int, num_right: int) -> float:
    """Returns the chance that at least one of k responses is right, estimated without bias from n of which c are right:
    1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374)."""
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


def without_passes(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metrics without pass@k, over all prompts and of each source."""
    return {name: value for name, value in metrics.items() if PASS not in name}


def titled(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns metrics under names for people: where each reward function has its own, those of the sum say so."""
    is_sum = any("@" in name.partition("/")[2] and "@" not in name.partition("/")[0] for name in metrics)
    titles = {name: " (weighted sum)" if is_sum and "@" in name.partition("/")[0] else "" for name in metrics}
    return {f"{name}{titles[name]}": value for name, value in metrics.items()}


def best_row(rows: Sequence[Mapping[str, float]], metric: str, *, less: bool = False) -> int:
    """Returns the first of the rows with the largest value of a metric; less: with the smallest."""
    sign = -1 if less else 1
    return max(range(len(rows)), key=lambda index: (sign * rows[index][metric], -index))


def _numbers(num_samples: int) -> list[int]:
    """Returns the k of pass@k: powers of two up to the number of samples, and that number."""
    return sorted({num_samples, *(2**exponent for exponent in range((num_samples - 1).bit_length()))})


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)
