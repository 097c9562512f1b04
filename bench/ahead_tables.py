"""What the tables of drawing one iteration ahead join: forecasts by strategy, and pairs of runs with a lag and
without."""

import math
import statistics
from collections.abc import Mapping, Sequence

MEASURE = "accuracy_mean"  # of a run of bench lag: of its evaluations after training has begun
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # of Student's distribution, by the number of pairs
AHEAD, PLANNER, FLATTENING = "one iteration ahead", "planner", "flattening"  # strategies in rows of the suite


def joined_ahead(rows: Sequence[Mapping]) -> list[dict]:
    """Returns one row for each case of the suite: seconds of each strategy, of both halves one ahead, and its gains."""
    cases: dict[tuple, dict[str, Mapping]] = {}
    for row in rows:
        place = row["preset"], row["layout"], row["calibration"], row["overrides"]
        cases.setdefault(place, {})[row["strategy"]] = row
    made = []
    for (preset, layout, calibration, overrides), found in cases.items():
        seconds = {name: row["iteration_s"] for name, row in found.items()}
        ahead = found[AHEAD]
        one = {"preset": preset, "layout": layout, "calibration": calibration, "words": words_of(overrides), **seconds}
        for base in (PLANNER, FLATTENING):
            one[f"gain_{base}"] = seconds[base] / seconds[AHEAD] if seconds[base] and seconds[AHEAD] else None
        one |= {"plan": found[PLANNER]["options"].get("plan"), "training_s": ahead.get("training_s")}
        one["drawing_s"] = ahead["generation_s"] + ahead["inference_s"] if ahead["iteration_s"] else None
        made.append(one)
    return made


def words_of(overrides: str) -> str:
    """Returns the lengths and epochs of a case, in words."""
    options = dict(word.split("=", 1) for word in overrides.split())
    mean, _, sigma = options["forecast_lengths"].partition(",")
    lengths = f"lognormal, mean {mean}, sigma {sigma}" if sigma else f"all {mean}"
    return f"{lengths}; epochs {options['ppo.epochs']}"


def paired(rows: Sequence[Mapping]) -> list[dict]:
    """Returns, of every algorithm, lag and correction that has two seeds at least, the mean difference of the measure
    from lag 0, half of its 95% interval, and the number of seeds."""
    base = {(row["page"], row["seed"]): row[MEASURE] for row in rows if row["lag"] == 0}
    found: dict[tuple, list[float]] = {}
    for row in rows:
        if row["lag"] and (row["page"], row["seed"]) in base:
            differences = found.setdefault((row["page"], row["lag"], row["correction"]), [])
            differences.append(row[MEASURE] - base[row["page"], row["seed"]])
    made = []
    for (page, lag, correction), differences in found.items():
        if (num := len(differences)) > 1:
            half = T_95[num] * statistics.stdev(differences) / math.sqrt(num)
            case = {"page": page, "lag": lag, "correction": correction, "seeds": num}
            made.append(case | {"difference": statistics.fmean(differences), "half": half})
    return made
