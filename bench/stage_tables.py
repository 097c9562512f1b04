"""The tables of the stages of alignment that generate nothing: the planner's plan beside ZeRO 3 and the strategies."""

from collections.abc import Callable, Mapping, Sequence

from bench.cells import number

Columns = dict[str, Callable[[dict], str]]
DEFAULT = "200g-per-gpu"  # the network of the calibration without another one
ZERO3 = "zero3"  # as a strategy of rows: flattening with ZeRO 3, and otherwise its defaults


def overlapped_s(row: Mapping) -> float:
    """Returns the seconds of an iteration whose messages all move during computation: nothing is faster."""
    return max(row["without_messages_s"], row["iteration_s"] - row["without_messages_s"])


def by_stage(rows: Sequence[Mapping]) -> list[dict]:
    """Groups rows by algorithm, model, layout and network, and by strategy. Each group says how many times faster the
    planner's plan is than ZeRO 3, as forecast and as if ZeRO 3 hid all its messages; None where either does not fit."""
    places: dict[tuple, dict] = {}
    for row in rows:
        place = {name: row[name] for name in ("algorithm", "preset", "layout", "calibration")}
        places.setdefault(tuple(place.values()), place | {"rows": {}})["rows"][row["strategy"]] = row
    for found in places.values():
        plan_s, zero3 = found["rows"]["planner"]["iteration_s"], found["rows"][ZERO3]
        found["factor"] = zero3["iteration_s"] / plan_s if plan_s and zero3["iteration_s"] else None
        found["least_factor"] = overlapped_s(zero3) / plan_s if found["factor"] else None
    return list(places.values())


def limit_of(row: Mapping) -> str:
    """Says what limits the training of a row."""
    return next((what for call, what in row["limits"].items() if "train" in call), "-") if "limits" in row else "-"


def _gib(row: Mapping) -> str:
    return number(row["peak_bytes"] / 2**30 if row["iteration_s"] else None)


def _plan(row: Mapping) -> str:
    """Returns the layouts of a plan; training is on all ranks, if nothing else is said."""
    if row["iteration_s"] is None:
        return "does not fit"
    nodes, devices = map(int, row["layout"].split("x"))
    everyone = f" on 0-{nodes * devices - 1}"
    calls = {call: text for call, text in row["options"].items() if call not in ("plan", "stream")}
    train = next(text for call, text in calls.items() if "train" in call).removesuffix(everyone)
    others = dict.fromkeys(text.removesuffix(everyone) for call, text in calls.items() if "train" not in call)
    return train + (f"; reference {' and '.join(others)}" if others else "")


PLACE: Columns = {
    "algorithm": lambda row: f"`{row['algorithm']}`",
    "model": lambda row: row["preset"],
    "layout": lambda row: row["layout"],
    "network": lambda row: "one node" if row["layout"] == "1x8" else row["calibration"].partition("+")[2] or DEFAULT,
}
JOINED: dict[str, tuple[str, Callable[[Sequence[dict]], list[dict]], Columns]] = {
    "stages": (
        "stages",
        by_stage,
        {
            **PLACE,
            "ZeRO 3: step, s": lambda row: number(row["rows"][ZERO3].get("step_s"), 2),
            "its limit": lambda row: limit_of(row["rows"][ZERO3]),
            **{
                f"`{name}`, s": lambda row, name=name: number(row["rows"].get(name, {}).get("step_s"), 2)
                for name in ("flattening", "reallocation", "separation")
            },
            "plan: step, s": lambda row: number(row["rows"]["planner"].get("step_s"), 2),
            "its limit ": lambda row: limit_of(row["rows"]["planner"]),
            "tokens/s and GPU": lambda row: number(row["rows"]["planner"].get("tokens_per_s_device"), 0),
            "GiB": lambda row: _gib(row["rows"]["planner"]),
            "over ZeRO 3": lambda row: number(row["factor"], 2),
            "over ZeRO 3 that hides its messages": lambda row: number(row["least_factor"], 2),
            "plan": lambda row: _plan(row["rows"]["planner"]),
        },
    ),
}
