"""What the tables of other systems join: seconds of each, and how many times faster the strategies are."""

from collections.abc import Mapping, Sequence

from bench.rows import STRATEGIES

DEEPSPEED_CHAT, PER_TOKEN = BASELINES = "deepspeed-chat", "zero3-per-token"  # as strategies of rows
AGAINST = (DEEPSPEED_CHAT, PER_TOKEN, "flattening")
SHIPPED = tuple(strategy for strategy in STRATEGIES if strategy != "planner")


def times_faster(rows: Sequence[Mapping]) -> list[dict]:
    """Returns the seconds by strategy of each model, layout and calibration, and how many times faster than each of
    AGAINST the planner's plan and the best shipped strategy are; None where either does not fit."""
    names, places = ("preset", "layout", "calibration"), {}
    for row in rows:
        place = {name: row[name] for name in names}
        found = places.setdefault(tuple(place.values()), place | {"seconds": {}})
        found["seconds"][row["strategy"]] = row["iteration_s"]
    for found in places.values():
        seconds = found["seconds"]
        fit = [name for name in SHIPPED if seconds.get(name)]
        found["shipped"] = min(fit, key=seconds.__getitem__) if fit else None
        mine = {"planner": seconds.get("planner"), "shipped": seconds.get(found["shipped"])}
        found["shipped_s"] = mine["shipped"]
        for base in AGAINST:
            for which, mine_s in mine.items():
                found[f"{which} over {base}"] = seconds[base] / mine_s if seconds.get(base) and mine_s else None
    return list(places.values())
