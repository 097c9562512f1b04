"""What is claimed of the rows of a suite: pure functions of rows."""

from collections.abc import Mapping, Sequence
from itertools import product

from bench.ahead_tables import joined_ahead
from bench.baseline_tables import AGAINST, times_faster
from bench.rows import STRATEGIES
from bench.stage_tables import by_stage

INTERLEAVING = ("interleaving1", "interleaving2")
SMALL, LARGE = ("1x8", "2x8"), ("4x8", "8x8")  # layouts, as the papers tell them apart
LARGE_MODELS = ("llama-33b", "llama-65b")
APP_FACTOR = 11  # the largest speed-up that APP reports
NEAR = 1.005  # forecasts this near to each other count as equal
Claims = dict[str, list[str] | None]  # name -> the cases in which it does not come out; None: no case decides it


def rate(rows: Sequence[Mapping], preset: str, layout: str, *strategies: str) -> float:
    """Samples per second of the best of some strategies; 0 where none fits."""
    found = [row for row in rows if (row["preset"], row["layout"]) == (preset, layout)]
    return max((row["samples_per_s"] or 0.0 for row in found if row["strategy"] in strategies), default=0.0)


def exceptions(pairs: Mapping[str, tuple[float, float]]) -> list[str] | None:
    """The cases whose first rate is not above the second one; None where there is nothing to compare."""
    if not pairs:
        return None
    return [f"{where}: {first:.3g} against {second:.3g}" for where, (first, second) in pairs.items() if first <= second]


def orders(rows: Sequence[Mapping]) -> Claims:
    """The order that APP reports (arXiv 2312.11819), and that the planner is behind nothing."""
    places = dict.fromkeys((row["preset"], row["layout"]) for row in rows)
    small = {
        f"{preset} {layout}": (rate(rows, preset, layout, *INTERLEAVING), rate(rows, preset, layout, "flattening"))
        for preset, layout in places
        if layout in SMALL and rate(rows, preset, layout, "flattening", *INTERLEAVING)
    }
    large = {
        f"{preset} {layout}": (
            rate(rows, preset, layout, "separation"),
            rate(rows, preset, layout, "flattening", *INTERLEAVING),
        )
        for preset, layout in places
        if layout in LARGE
        and preset in LARGE_MODELS
        and rate(rows, preset, layout, "separation", "flattening", *INTERLEAVING)
    }
    one_node = {
        f"{preset} {layout}": (rate(rows, preset, layout, "flattening"), rate(rows, preset, layout, "separation"))
        for preset, layout in places
        if layout == "1x8" and rate(rows, preset, layout, "flattening", "separation")
    }
    found = {
        "interleaving_ahead_on_small": exceptions(small),
        "separation_ahead_on_large": exceptions(large),
        "separation_behind_on_one_node": exceptions(one_node),
    }
    return found | planner_first(rows)


def planner_first(rows: Sequence[Mapping]) -> Claims:
    """The planner's plan is as fast as the best strategy, up to the tolerance NEAR."""
    places = dict.fromkeys((row["preset"], row["layout"]) for row in rows if row["strategy"] == "planner")
    fixed = [strategy for strategy in STRATEGIES if strategy != "planner"]
    pairs = {
        f"{preset} {layout}": (NEAR * rate(rows, preset, layout, "planner"), rate(rows, preset, layout, *fixed))
        for preset, layout in places
        if rate(rows, preset, layout, "planner", *fixed)
    }
    return {"planner_first": exceptions(pairs)}


def planner_first_for_each(rows: Sequence[Mapping]) -> Claims:
    """The same of every algorithm by itself."""
    found: list[str] = []
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        slower = planner_first([row for row in rows if row["algorithm"] == name])["planner_first"]
        found += [f"{name}, {case}" for case in slower or ["nothing fits"]] if slower != [] else []
    return {"planner_first": found}


def planner_first_for_lengths(rows: Sequence[Mapping]) -> Claims:
    """The same of every distribution of lengths by itself."""
    found: list[str] = []
    for lengths in dict.fromkeys(row["forecast_lengths"] for row in rows):
        slower = planner_first([row for row in rows if row["forecast_lengths"] == lengths])["planner_first"]
        found += [f"lengths {lengths}, {case}" for case in slower or ["nothing fits"]] if slower != [] else []
    return {"planner_first": found}


def frozen_halved(rows: Sequence[Mapping]) -> Claims:
    """Interleaving halves the replicas of reference and reward model; under ZeRO 3 they take what they took."""
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
    return found


def traffic_small(rows: Sequence[Mapping]) -> Claims:
    """The transfers of interleaving take less than a hundredth of an iteration."""
    late = [row for row in rows if row["samples_per_s"] and row["data_exposed_s"] >= 0.01 * row["iteration_s"]]
    return {"traffic_below_1_percent": [f"{row['preset']} {row['layout']} {row['strategy']}" for row in late]}


def overlapping(rows: Sequence[Mapping]) -> Claims:
    """Under separation, generation and training lie over each other; the weights' way back is short."""
    mine = [row for row in rows if row["strategy"] == "separation"]
    fit = [row for row in mine if row["samples_per_s"]]
    alone = [row for row in fit if row["generation_s"] + row["training_s"] <= row["iteration_s"]]
    slow = [row for row in fit if row["sync_exposed_s"] >= 0.05 * row["iteration_s"]]
    return {
        "separation_fits": [f"{row['preset']} {row['layout']}" for row in mine if not row["samples_per_s"]],
        "generation_and_training_overlap": [f"{row['preset']} {row['layout']}" for row in alone],
        "sync_below_5_percent": [f"{row['preset']} {row['layout']}" for row in slow],
    }


def mixed_ahead(rows: Sequence[Mapping]) -> Claims:
    """On mixed devices: one type generating and the other training, against everything on both types."""
    pairs = {
        f"{row['preset']} {row['nodes']}": (row["nodes"], row["preset"])
        for row in rows
        if row["strategy"] == "heterogeneous"
    }
    found = {}
    for where, (nodes, preset) in pairs.items():
        alike = [row for row in rows if (row["nodes"], row["preset"]) == (nodes, preset)]
        best = {
            name: max((row["samples_per_s"] or 0.0 for row in alike if row["strategy"] == name), default=0.0)
            for name in ("heterogeneous", "flattening")
        }
        found[where] = best["heterogeneous"], best["flattening"]
    return {"types_apart_ahead_of_flattening": exceptions(found)}


def networks_agree(rows: Sequence[Mapping]) -> Claims:
    """The same strategy is the fastest of the shipped ones, whatever the device and the network between nodes."""
    fixed, different = [strategy for strategy in STRATEGIES if strategy != "planner"], []
    for preset, layout in dict.fromkeys((row["preset"], row["layout"]) for row in rows):
        alike = [row for row in rows if (row["preset"], row["layout"]) == (preset, layout)]
        best = {}
        for calibration in dict.fromkeys(row["calibration"] for row in alike):
            rates = {name: rate(_of(alike, calibration), preset, layout, name) for name in fixed}
            best[calibration] = max(rates, key=rates.__getitem__)
        if len(set(best.values())) > 1:
            words = ", ".join(f"{name} on {calibration}" for calibration, name in best.items())
            different.append(f"{preset} {layout}: {words}")
    return {"same_strategy_on_every_network": different}


def eleven_times(rows: Sequence[Mapping]) -> Claims:
    """APP's "up to 11 times" (arXiv 2312.11819): per network and baseline, whether the planner's plan is anywhere so
    much faster; an exception names the largest factor."""
    found = {}
    for base, calibration in product(AGAINST, dict.fromkeys(row["calibration"] for row in rows)):
        factors = [row[f"planner over {base}"] or 0.0 for row in times_faster(_of(rows, calibration))]
        most = max(factors)
        words = f"at most {most:.2f} times" if most else "nothing fits"
        found[f"11_times_over_{base}_on_{calibration}"] = [] if most >= APP_FACTOR else [words]
    return found


def planner_first_on_each(rows: Sequence[Mapping]) -> Claims:
    """The planner is first on every network."""
    found = []
    for calibration in dict.fromkeys(row["calibration"] for row in rows):
        slower = planner_first(_of(rows, calibration))["planner_first"]
        found += [f"{calibration}, {case}" for case in slower or []]
    return networks_agree(rows) | {"planner_first": found}


def ahead_of_zero3(rows: Sequence[Mapping]) -> Claims:
    """On every network, the planner's plan is nowhere slower than the best strategy or ZeRO 3."""
    names = ("algorithm", "preset", "layout", "calibration")
    places = {" ".join(place[name] for name in names): place["factor"] for place in by_stage(rows)}
    found = [planner_first_for_each(_of(rows, one)) for one in dict.fromkeys(row["calibration"] for row in rows)]
    return {
        "planner_first": [case for claims in found for case in claims["planner_first"] or []],
        "planner_ahead_of_zero3": exceptions({case: (one, 1 / NEAR) for case, one in places.items() if one}),
    }


def ahead_gains(rows: Sequence[Mapping]) -> Claims:
    """One iteration ahead, separation is faster than the fastest plan without, and than flattening."""
    cases = joined_ahead(rows)
    found = {}
    for base in ("planner", "flattening"):
        pairs = {f"{one['preset']} {one['layout']} {one['words']}": one[f"gain_{base}"] for one in cases}
        found[f"ahead_faster_than_{base}"] = exceptions({case: (gain, 1.0) for case, gain in pairs.items() if gain})
    return found


def _of(rows: Sequence[Mapping], calibration: str) -> list[Mapping]:
    return [row for row in rows if row["calibration"] == calibration]
