"""What the tables of recipes join: a strategy with its options for each size of model, number of GPUs and memory."""

from collections.abc import Mapping, Sequence
from statistics import median

FAST = "200g-per-gpu"  # the network between nodes, if a calibration names no other one
LORA = "+lora"  # behind the name of an algorithm: with adapters


def others(row: Mapping) -> str:
    """Returns the other strategies that fit, the fastest first, by their seconds over those of the recipe."""
    if not row["strategy"]:
        return ""
    fitting = {name: one["iteration_s"] for name, one in row["strategies"].items() if "iteration_s" in one}
    found = sorted((seconds, name) for name, seconds in fitting.items() if name != row["strategy"])
    return ", ".join(f"{name} {seconds / row['iteration_s']:.2f}" for seconds, name in found)


def of_algorithm(algorithm: str, rows: Sequence[dict]) -> list[dict]:
    """Returns the recipes of an algorithm with 200 Gb/s for each GPU."""
    return [row for row in rows if row["algorithm"] == algorithm and row["network"] == FAST]


def slow(rows: Sequence[dict]) -> list[dict]:
    """Returns the recipes with 200 Gb/s for each node; what does not fit there does not fit on the fast network
    either."""
    return [row for row in rows if row["network"] != FAST and row["strategy"]]


def adapted(rows: Sequence[dict]) -> list[dict]:
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
        about |= {"recipe": sum(row["strategy"] == name for row in places), "times": times}
        some = {"median": median(times), "range": f"{times[0]:.2f} to {times[-1]:.2f}"} if times else {}
        found.append(about | some)
    return found
