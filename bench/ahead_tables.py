"""What the tables of drawing one iteration ahead join: forecasts by strategy, and pairs of runs with a lag and
without."""

import math
import statistics
from collections.abc import Mapping, Sequence

MEASURE = "accuracy_mean"  # of a run of bench lag: of its evaluations after training has begun
MEASURES = {"": MEASURE, "last_": "accuracy_last"}  # what is compared, by what its differences are called
OF_PAIR = ("page", "actor_lr", "warmup")  # what both runs of a pair have, and the seed
OF_PLACE = (*OF_PAIR, "lag", "correction")
NATS = {"nats": "parity_mean_abs", "largest_nats": "parity_mean_abs_largest"}  # of an iteration's lag: mean, largest
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
    """Returns, of every algorithm, rate, warm-up, lag and correction that has two seeds at least: the number of seeds,
    the mean difference of each measure from lag 0, half of its 95% interval, and the mean over the seeds of the lag in
    nats, where every row has it."""
    places: dict[tuple, list[tuple[Mapping, Mapping]]] = {}
    base = {tuple(row[name] for name in (*OF_PAIR, "seed")): row for row in rows if row["lag"] == 0}
    for row in rows:
        if row["lag"] and (alone := base.get(tuple(row[name] for name in (*OF_PAIR, "seed")))):
            places.setdefault(tuple(row[name] for name in OF_PLACE), []).append((row, alone))
    made = []
    for place, pairs in places.items():
        if (num := len(pairs)) < 2:
            continue
        one: dict = dict(zip(OF_PLACE, place, strict=True)) | {"seeds": num}
        for prefix, measure in MEASURES.items():
            differences = [row[measure] - alone[measure] for row, alone in pairs]
            one[f"{prefix}difference"] = statistics.fmean(differences)
            one[f"{prefix}half"] = T_95[num] * statistics.stdev(differences) / math.sqrt(num)
        for name, measure in NATS.items():
            found = [row[measure] for row, _ in pairs if measure in row]
            one[name] = statistics.fmean(found) if len(found) == num else None
        made.append(one)
    return made
