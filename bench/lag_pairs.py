"""The runs of `bench lag` (bench/numbers/lag.py), and the differences of their pairs."""

import math
import statistics
from itertools import product
from typing import Any

PAGES, LAGS, SEEDS = ("grpo", "ppo"), (1, 2, 4), (0, 1, 2, 3, 4)
WEIGHTED = ("old_logprobs=recompute", "importance_weights=token")
CORRECTIONS = {  # options of the page
    "none": ("old_logprobs=generator",),  # ratios against the generator are clipped
    "TIS": WEIGHTED,
    "IcePop": (*WEIGHTED, "importance_cap=none", "rejection=token"),
    "decoupled": (*WEIGHTED, "importance_cap=none"),
}
MEASURE = "accuracy_mean"  # of the evaluations after training has begun
KEY = ("page", "seed", "lag", "correction")
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # of Student's distribution, by the number of pairs


def paired(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every page, lag and correction that has two seeds at least: the mean difference of the measure from lag 0,
    half of its 95% interval, and the number of seeds."""
    found = {tuple(row[name] for name in KEY): row[MEASURE] for row in rows}
    made = []
    for page, lag, correction in product(PAGES, LAGS, CORRECTIONS):
        pairs = [(found.get((page, seed, lag, correction)), found.get((page, seed, 0, "none"))) for seed in SEEDS]
        differences = [late - base for late, base in pairs if late is not None and base is not None]
        if (num := len(differences)) > 1:
            half = T_95[num] * statistics.stdev(differences) / math.sqrt(len(differences))
            mean = statistics.fmean(differences)
            case = {"page": page, "lag": lag, "correction": correction, "seeds": num}
            made.append(case | {"difference": mean, "half": half})
    return made
