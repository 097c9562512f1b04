"""The tables of recipes: a strategy with its options for each size of model, number of GPUs and memory."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

from bench.cells import number

Columns = dict[str, Callable[[dict], str]]
FAST, LORA = "200g-per-gpu", "+lora"  # as in forecast/recipes.py


def _others(row: dict) -> str:
    """Returns the other strategies that fit, the fastest first, by their seconds over those of the recipe."""
    if not row["strategy"]:
        return "-"
    fitting = {name: one["iteration_s"] for name, one in row["strategies"].items() if "iteration_s" in one}
    others = sorted((seconds, name) for name, seconds in fitting.items() if name != row["strategy"])
    return ", ".join(f"{name} {seconds / row['iteration_s']:.2f}" for seconds, name in others) or "-"


def _for(algorithm: str, rows: Sequence[dict]) -> list[dict]:
    """Returns the recipes of an algorithm with 200 Gb/s for each GPU."""
    return [row for row in rows if row["algorithm"] == algorithm and row["network"] == FAST]


def _slow(rows: Sequence[dict]) -> list[dict]:
    """Returns the recipes with 200 Gb/s for each node; what does not fit there does not fit on the fast network
    either."""
    return [row for row in rows if row["network"] != FAST and row["strategy"]]


def _adapted(rows: Sequence[dict]) -> list[dict]:
    """Returns the recipes with adapters, with the seconds of full training at the same place."""
    where = ("preset", "layout", "device_type", "network")
    seconds = {(row["algorithm"], *(row[key] for key in where)): row.get("iteration_s") for row in rows}
    found = [
        row | {"algorithm": row["algorithm"].removesuffix(LORA)} for row in rows if row["algorithm"].endswith(LORA)
    ]
    return [row | {"full_s": seconds[row["algorithm"], *(row[key] for key in where)]} for row in found]


def by_strategy(rows: Sequence[dict]) -> list[dict]:
    """Returns one row for each strategy, algorithm and kind of machine: how often it fits and is the recipe, and how
    long it takes compared with the recipe."""
    kinds: dict[tuple[str, str, str], list[dict]] = {}
    for row in rows:
        if row["strategy"] and not row["algorithm"].endswith(LORA):
            where = "one node" if row["layout"].startswith("1x") else f"several, {row['network']}"
            for name in row["strategies"]:
                kinds.setdefault((row["algorithm"], where, name), []).append(row)
    found = []
    for (algorithm, where, name), places in kinds.items():
        fitting = [row for row in places if "iteration_s" in row["strategies"][name]]
        times = sorted(row["strategies"][name]["iteration_s"] / row["iteration_s"] for row in fitting)
        about = {"algorithm": algorithm, "where": where, "strategy": name, "places": len(places), "fits": len(fitting)}
        found.append(about | {"recipe": sum(row["strategy"] == name for row in places), "times": times})
    return found


RECIPE: Columns = {
    "model": lambda row: f"`{row['preset']}`",
    "GPUs": lambda row: row["layout"],
    "GiB each": lambda row: str(row["device_gib"]),
    "strategy": lambda row: f"`{row['strategy']}`" if row["strategy"] else "does not fit",
    "options": lambda row: f"`{row['options']}`" if row.get("options") else "-",
    "GiB used": lambda row: number(row["peak_bytes"] / 2**30 if row["strategy"] else None),
    "seconds": lambda row: number(row["iteration_s"] if row["strategy"] else None),
    "others, times as long": _others,
}
ALGORITHM: Columns = {"algorithm": lambda row: f"`{row['algorithm']}`"}
STRATEGIES: Columns = {
    **ALGORITHM,
    "machines": lambda row: row["where"],
    "strategy": lambda row: f"`{row['strategy']}`",
    "fits": lambda row: f"{row['fits']} of {row['places']}",
    "is the recipe": lambda row: str(row["recipe"]),
    "its seconds over the recipe's: median": lambda row: number(median(row["times"]) if row["times"] else None, 2),
    "range": lambda row: f"{row['times'][0]:.2f} to {row['times'][-1]:.2f}" if row["times"] else "-",
}
FULL: Columns = {"full training, seconds": lambda row: number(row["full_s"]) if row["full_s"] else "does not fit"}
COLUMNS: dict[str, Columns] = {
    "recipes": {**ALGORITHM, **RECIPE, "network": lambda row: row["network"]},
}
JOINED: dict[str, tuple[str, Callable[[Sequence[dict]], list[dict]], Columns]] = {
    "recipes_ppo": ("recipes", partial(_for, "ppo"), RECIPE),
    "recipes_grpo": ("recipes", partial(_for, "grpo"), RECIPE),
    "recipes_slow": ("recipes", _slow, ALGORITHM | RECIPE),
    "recipes_lora": ("recipes", _adapted, ALGORITHM | RECIPE | FULL),
    "recipes_strategies": ("recipes", by_strategy, STRATEGIES),
}
