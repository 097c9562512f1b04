"""What is claimed of the rows of a suite: pure functions of rows."""

from collections.abc import Mapping, Sequence
from itertools import product

from bench.cells import Row, grouped, number
from bench.rows import BASELINES, SHIPPED
from rlhf_spmd.plan.search.candidates import LEAST_GAIN

INTERLEAVING = ("interleaving1", "interleaving2")
SMALL, LARGE = ("1x8", "2x8"), ("4x8", "8x8")  # layouts, as the papers tell them apart
LARGE_MODELS = ("llama-33b", "llama-65b")
APP_FACTOR = 11  # the largest speed-up that APP reports
APART = ("A100s generate", "H100s generate")  # strategies of rows in the suite heterogeneous
AHEAD, PHASES = "one iteration ahead", "generation_s + training_s"
NEAR = 1.005  # forecasts this near to each other count as equal
FIRST = NEAR + LEAST_GAIN  # so near is a plan: for less, the planner takes no larger micro-batch
PLACE = ("algorithm", "preset", "layout", "calibration", "forecast_lengths")  # what compared rows have in common
Claims = dict[str, list[str] | None]  # name -> the cases in which it does not come out; None: no case decides it


def place_of(row: Mapping) -> tuple:
    """Returns the values of PLACE; None for what a row does not have."""
    return tuple(row.get(name) for name in PLACE)


def rate(rows: Sequence[Mapping], place: tuple, strategies: Sequence[str]) -> float:
    """Samples per second of the best of some strategies in a place; 0 where none fits."""
    found = [row for row in rows if place_of(row) == place and row["strategy"] in strategies]
    return max((row["samples_per_s"] or 0.0 for row in found), default=0.0)


def exceptions(pairs: Mapping[str, tuple[float, float]]) -> list[str] | None:
    """Lists the cases whose first rate is not above the second one; None where there is nothing to compare."""
    if not pairs:
        return None
    return [f"{where}: {first:.3g} against {second:.3g}" for where, (first, second) in pairs.items() if first <= second]


def faster(rows: Sequence[Mapping], first: Sequence[str], second: Sequence[str], near: float = 1.0) -> list[str] | None:
    """Lists the places in which the best of `first`, times `near`, is not ahead of the best of `second`."""
    pairs = {}
    for place in dict.fromkeys(map(place_of, rows)):
        rates = near * rate(rows, place, first), rate(rows, place, second)
        if any(rates):
            pairs[" ".join(filter(None, place))] = rates
    return exceptions(pairs)


def planner_first(rows: Sequence[Mapping]) -> Claims:
    """Checks that in every place the planner's plan is as fast as the best strategy, up to the tolerance FIRST."""
    planned = {place_of(row) for row in rows if row["strategy"] == "planner"}
    return {"planner_first": faster([row for row in rows if place_of(row) in planned], ["planner"], SHIPPED, FIRST)}


def orders(rows: Sequence[Mapping]) -> Claims:
    """Checks APP's order of strategies (arXiv 2312.11819), how little their messages add, and the planner's lead."""
    small, one_node = ([row for row in rows if row["layout"] in layouts] for layouts in (SMALL, SMALL[:1]))
    large = [row for row in rows if row["layout"] in LARGE and row["preset"] in LARGE_MODELS]
    return {
        "interleaving_ahead_on_small": faster(small, INTERLEAVING, ["flattening"]),
        "separation_ahead_on_large": faster(large, ["separation"], ["flattening", *INTERLEAVING]),
        "separation_behind_on_one_node": faster(one_node, ["flattening"], ["separation"]),
        "data_below_1_percent_in_interleaving": late(rows, INTERLEAVING, "data_exposed_s", 0.01),
        "new_weights_below_5_percent_in_separation": late(rows, ["separation"], "sync_exposed_s", 0.05),
        **planner_first(rows),
    }


def late(rows: Sequence[Mapping], strategies: Sequence[str], seconds: str, share: float) -> list[str] | None:
    """Lists the cases in which messages of some strategies add a share of an iteration or more."""
    fit = [row for row in rows if row["strategy"] in strategies and row["samples_per_s"]]
    found = [row for row in fit if row[seconds] >= share * row["iteration_s"]]
    return [f"{row['preset']} {row['layout']} {row['strategy']}" for row in found] if fit else None


def frozen_halved(rows: Sequence[Mapping]) -> Claims:
    """Checks that interleaving halves the replicas of frozen models; under ZeRO 3 they take what they took."""
    found: dict[str, list[str]] = {"replicas_halved": [], "shards_unchanged": [], "shadows_cost": []}
    for row in rows:
        alike = [other for other in rows if other["preset"] == row["preset"] and other["options"] == row["options"]]
        flat = next(other for other in alike if other["strategy"] == "flattening")
        where = f"{row['preset']} {row['layout']} {row['strategy']} zero={row['options']['zero']}"
        if row["strategy"] in INTERLEAVING:
            zero = row["options"]["zero"]
            wanted = flat["frozen_bytes"] / (1 if zero == 3 else 2)
            if abs(row["frozen_bytes"] - wanted) > 0.01 * wanted:
                found["shards_unchanged" if zero == 3 else "replicas_halved"].append(where)
        if row["strategy"] == "separation" and row["shadow_bytes"] == 0:
            found["shadows_cost"].append(where)
    return dict(found)


def eleven_times(rows: Sequence[Mapping]) -> Claims:
    """Checks APP's "up to 11 times" (arXiv 2312.11819) for each network and baseline: is the planner's plan anywhere so
    much faster? An exception names the largest factor."""
    found: Claims = {}
    for base, calibration in product((*BASELINES, "flattening"), dict.fromkeys(row["calibration"] for row in rows)):
        places = places_of([row for row in rows if row["calibration"] == calibration])
        most = max(number(f"{base}[iteration_s] / planner[iteration_s]", place) or 0.0 for place in places)
        words = f"at most {most:.2f} times" if most else "nothing fits"
        found[f"11_times_over_{base}_on_{calibration}"] = [] if most >= APP_FACTOR else [words]
    return found


def ahead_of_zero3(rows: Sequence[Mapping]) -> Claims:
    """Checks that on no network the planner's plan is slower than the best strategy or ZeRO 3."""
    return planner_first(rows) | {"planner_ahead_of_zero3": quicker(rows, "planner", "zero3", 1 / NEAR)}


def ahead_gains(rows: Sequence[Mapping]) -> Claims:
    """Checks that separation one iteration ahead is faster than flattening and than the fastest plan without it."""
    return {f"ahead_faster_than_{base}": quicker(rows, AHEAD, base) for base in ("planner", "flattening")}


def mixed_ahead(rows: Sequence[Mapping]) -> Claims:
    """Checks that on mixed devices one type that generates and another that trains are ahead of all on both types."""
    return {"types_apart_ahead_of_flattening": faster(rows, APART, ["flattening"])} | planner_first(rows)


def separation_of_large_models(rows: Sequence[Mapping]) -> Claims:
    """Checks that separation fits, that its generation and training overlap, and that its weights return fast."""
    apart = [row for row in rows if row["strategy"] == "separation"]
    alone = [row for row in apart if row["samples_per_s"] and number(PHASES, row) <= row["iteration_s"]]
    named = {
        "separation_fits": [row for row in apart if not row["samples_per_s"]],
        "generation_and_training_overlap": alone,
    }
    found: Claims = {claim: [f"{row['preset']} {row['layout']}" for row in cases] for claim, cases in named.items()}
    return found | {"new_weights_below_5_percent_in_separation": late(rows, ["separation"], "sync_exposed_s", 0.05)}


def freedoms_gain(rows: Sequence[Mapping]) -> Claims:
    """Checks that a plan with one freedom more is never slower, up to the tolerance NEAR."""
    wrong = []
    for place in places_of(rows):
        steps = [row["iteration_s"] for row in place[""]]
        slower = [after / before for before, after in zip(steps, steps[1:], strict=False) if after > NEAR * before]
        wrong += [f"{place['preset']} {place['overrides']}: {factor:.3f} times" for factor in slower]
    return {"no_freedom_costs": wrong}


def places_of(rows: Sequence[Mapping]) -> list[Row]:
    """Joins the rows of each place."""
    return grouped(rows, (*PLACE, "overrides"))


def quicker(rows: Sequence[Mapping], first: str, second: str, least: float = 1.0) -> list[str] | None:
    """Lists the places in which one strategy is not more than `least` times as fast as another one."""
    pairs = {}
    for place in places_of(rows):
        factor = number(f"{second}[iteration_s] / {first}[iteration_s]", place)
        if factor:
            words = [*place_of(place)[:4], place.get("overrides") if first == AHEAD else None]
            pairs[" ".join(filter(None, words))] = factor, least
    return exceptions(pairs)
