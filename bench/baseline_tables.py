"""The tables of other systems beside the strategies: seconds of each, and how many times faster the strategies are."""

from collections.abc import Callable, Mapping, Sequence

from bench.cells import number
from bench.rows import STRATEGIES

Columns = dict[str, Callable[[dict], str]]
DEEPSPEED_CHAT, PER_TOKEN = BASELINES = "deepspeed-chat", "zero3-per-token"  # as strategies of rows
AGAINST = {DEEPSPEED_CHAT: "DeepSpeed-Chat", PER_TOKEN: "ZeRO 3 per token", "flattening": "flattening"}
SHIPPED = tuple(strategy for strategy in STRATEGIES if strategy != "planner")


def times_faster(rows: Sequence[Mapping]) -> list[dict]:
    """Returns the seconds by strategy of each model, layout and calibration. Columns say how many times faster than
    each of AGAINST the planner's plan and the best shipped strategy are; None where either does not fit."""
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
        for base in AGAINST:
            for which, mine_s in mine.items():
                found[f"{which} over {base}"] = seconds[base] / mine_s if seconds.get(base) and mine_s else None
    return list(places.values())


PLACE: Columns = {
    "model": lambda row: row["preset"],
    "layout": lambda row: row["layout"],
    "network": lambda row: "one node" if row["layout"] == "1x8" else row["calibration"].partition("+")[2],
}
JOINED: dict[str, tuple[str, Callable[[Sequence[dict]], list[dict]], Columns]] = {
    "baselines_factors": (
        "baselines",
        times_faster,
        {
            **PLACE,
            **{
                f"{which} over {words}": lambda row, key=f"{which} over {base}": number(row[key], 2)
                for base, words in AGAINST.items()
                for which in ("planner", "shipped")
            },
        },
    ),
    "baselines_seconds": (
        "baselines",
        times_faster,
        {
            **PLACE,
            **{
                f"{words}, s": lambda row, name=name: number(row["seconds"].get(name))
                for name, words in AGAINST.items()
            },
            "best shipped": lambda row: f"`{row['shipped']}`" if row["shipped"] else "-",
            "its s": lambda row: number(row["seconds"].get(row["shipped"])),
            "planner, s": lambda row: number(row["seconds"].get("planner")),
        },
    ),
}
