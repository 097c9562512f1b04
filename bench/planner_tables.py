"""The tables of the planner: seconds of its methods, their distances from the optimum, rehearsals; derived seconds."""

from collections.abc import Callable

from bench.cells import number, percent

Columns = dict[str, Callable[[dict], str]]


COLUMNS: dict[str, Columns] = {
    "derived": {
        "what, on one H100": lambda row: row["what"],
        "roofline, ms": lambda row: number(1e3 * row["roofline_s"], 3),
        "derived, ms": lambda row: number(1e3 * row["derived_s"], 3),
        "roofline of it": lambda row: percent(row["roofline_s"] / row["derived_s"], 0),
        "terms, ms": lambda row: ", ".join(f"{name} {1e3 * s:,.3f}" for name, s in row["terms"].items()),
        "formula": lambda row: row["formula"],
    },
    "plan_speed": {
        "what": lambda row: row["what"],
        "layout": lambda row: row["layout"],
        "seconds": lambda row: f"{row['seconds']:.1f}",
        "promised": lambda row: f"{row['promised_s']:g}",
        "simulation, s": lambda row: f"{row['simulate_s']:.1f}",
        "gap": lambda row: percent(row.get("gap")),
    },
    "rehearse": {
        "strategy": lambda row: f"`{row['strategy']}`",
        "forecast, s": lambda row: number(row["forecast_s"]),
        "rehearsed, s": lambda row: ", ".join(number(seconds) for seconds in row["rehearsed_s"]),
        "difference": lambda row: f"{row['error']:+.1%}",
        "processors": lambda row: percent(row["processor_share"], 0),
        "memory, GB": lambda row: number(row["peak_bytes"] / 1e9),
        "seconds in all": lambda row: number(row["seconds"], 0),
    },
    "plan_methods": {
        "model": lambda row: row["preset"],
        "devices": lambda row: f"{row['devices']:,}",
        "responses": lambda row: f"{row['rows']:,}",
        "method": lambda row: row["method"] if row["method"].startswith("APP") else f"`{row['method']}`",
        "processor, s": lambda row: number(row["processor_s"]),
        "by the clock, s": lambda row: number(row["seconds"]),
        "placements scored": lambda row: f"{row['num_scored']:,}",
        "call-level, s": lambda row: number(row["call_level_s"], 2),
        "from the optimum": lambda row: percent(row["distance"], 2) + ("" if row["proved"] else " (of the best)"),
        "gap": lambda row: percent(row["gap"]),
        "forecast, s": lambda row: number(row.get("forecast_s"), 2),
        "plan": lambda row: row.get("plan", "-"),
    },
}
