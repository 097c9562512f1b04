"""What the tables of stages that generate nothing join: the planner's plan beside ZeRO 3 and the strategies."""

from collections.abc import Mapping, Sequence

ZERO3 = "zero3"  # as a strategy of rows: flattening with ZeRO 3, and otherwise its defaults


def overlapped_s(row: Mapping) -> float:
    """Returns the seconds of an iteration whose messages all move during computation: nothing is faster."""
    return max(row["without_messages_s"], row["iteration_s"] - row["without_messages_s"])


def by_stage(rows: Sequence[Mapping]) -> list[dict]:
    """Groups rows by algorithm, model, layout and network, and by strategy. Each group says how many times faster the
    planner's plan is than ZeRO 3, as forecast and as if ZeRO 3 hid all its messages (None where either does not fit),
    what limits both in training, and the layouts of the plan."""
    places: dict[tuple, dict] = {}
    for row in rows:
        place = {name: row[name] for name in ("algorithm", "preset", "layout", "calibration")}
        places.setdefault(tuple(place.values()), place | {"rows": {}})["rows"][row["strategy"]] = row
    for found in places.values():
        plan, zero3 = found["rows"]["planner"], found["rows"][ZERO3]
        plan_s = plan["iteration_s"]
        found["factor"] = zero3["iteration_s"] / plan_s if plan_s and zero3["iteration_s"] else None
        found["least_factor"] = overlapped_s(zero3) / plan_s if found["factor"] else None
        found |= {"zero3_limit": limit_of(zero3), "plan_limit": limit_of(plan), "plan": _plan(plan)}
    return list(places.values())


def limit_of(row: Mapping) -> str | None:
    """Says what limits the training of a row."""
    return next((what for call, what in row.get("limits", {}).items() if "train" in call), None)


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
