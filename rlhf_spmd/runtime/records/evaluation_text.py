"""Metrics of evaluations (config/evaluation_metrics.py) for people: of several reward functions, which number is of
what."""

from collections.abc import Mapping
from typing import Any

SUM = "weighted sum"  # of the scores of reward functions, and of a model


def titled(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metrics of an evaluation under names for people: those of a sum say so."""
    is_sum = any("@" in name.partition("/")[2] for name in metrics)
    titles = {name: f"{name} ({SUM})" if is_sum and "@" in name.partition("/")[0] else name for name in metrics}
    return {titles[name]: value for name, value in metrics.items()}


def told(texts: Mapping[str, str]) -> str:
    """Returns metrics and their values as text: `mean@1 0.5`, or `mean@1 right 0.5, form 1 (weighted sum 1.5)`."""
    functions = dict.fromkeys(name.rpartition("/")[0] for name in texts if "/" in name)
    found = []
    for name in dict.fromkeys(name.rpartition("/")[2] for name in texts):
        shown = [one for one in functions if f"{one}/{name}" in texts or name == "pass@1"]
        each = ", ".join(f"{one} {texts.get(f'{one}/{name}', 'none')}" for one in shown)
        total = f"({SUM} {texts[name]})" if each and name in texts else texts.get(name, "")
        found.append(" ".join(filter(None, [name, each, total])))
    return ", ".join(found)
