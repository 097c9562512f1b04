"""The columns of the tables in documents and terminals: a heading, and a cell as a function of a row (columns.toml)."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

from bench import recipe_tables as recipes
from bench.ahead_tables import joined_ahead, paired
from bench.baseline_tables import times_faster
from bench.cells import cell
from bench.stage_tables import by_stage

Columns = dict[str, Callable[[dict], str]]
Joined = tuple[str, Callable[[Sequence[dict]], list[dict]], Columns]
ERRORS = ("loss_error", "metrics_error", "gradient_error", "weights_error")  # of a step against TRL's


# ---- one row for several ---------------------------------------------------------------------------------------------


def by_place(rows: Sequence[dict]) -> list[dict]:
    """Groups rows by model, layout, calibration and lengths; each has its samples per second by strategy."""
    names, places = ("preset", "layout", "calibration", "forecast_lengths"), {}
    for row in rows:
        place = places.setdefault(tuple(row.get(name) for name in names), {name: row.get(name) for name in names})
        place[row["strategy"]] = row["samples_per_s"]
    return list(places.values())


def by_system(rows: Sequence[dict]) -> list[dict]:
    """Averages the errors of each system whose published runs were forecast, by how the constants came to them."""
    errors: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        errors.setdefault((row["system"], row["seconds_are"]), []).append(abs(row["error"]))
    return [
        {"system": system, "seconds_are": how, "rows": len(found), "mean": sum(found) / len(found), "worst": max(found)}
        for (system, how), found in sorted(errors.items())
    ]


def by_rank_of_adapters(rows: Sequence[dict]) -> list[dict]:
    """Takes the means over seeds, and the worst seed, of each task and rank of adapters."""
    found: dict[tuple[str, int], list[dict]] = {}
    for row in rows:
        found.setdefault((row["task"], row["rank"]), []).append(row)
    made = []
    for (task, rank), some in found.items():
        first, last = ([row[when] for row in some] for when in ("first", "last"))
        worst = max(last) if task == "sft" else min(last)
        means = {"first": sum(first) / len(first), "last": sum(last) / len(last), "worst": worst, "seeds": len(some)}
        made.append({"task": task, "rank": rank, "is_share": task != "sft"} | some[0] | means)
    return made


def by_case(rows: Sequence[dict]) -> list[dict]:
    """Finds the largest errors over the models, by precision, for each loss that was compared with TRL's."""
    cases: dict[str, dict] = {}
    for row in rows:
        case = cases.setdefault(row["case"], {"case": row["case"], "conventions": row["difference"] or "the same"})
        worst = case.setdefault(row["precision"], {name: 0.0 for name in ERRORS if name in row})
        worst |= {name: max(error, row[name]) for name, error in worst.items()}
    return list(cases.values())


# ---- values that no row has ------------------------------------------------------------------------------------------


def _options(row: Mapping) -> str:
    """Returns the options of a forecast, the name of a plan, or why nothing fits."""
    if row["samples_per_s"] is None:
        return row["why_not"]
    options = {"plan": row["options"]["plan"]} if "plan" in row["options"] else row["options"]
    words = ((name, ",".join(one) if isinstance(one, list | tuple) else str(one)) for name, one in options.items())
    return " ".join(f"{name}={word}" for name, word in words if word)


def _measure(when: str) -> Callable[[Mapping], str]:
    """Formats shares as percentages and other measures as numbers."""
    return lambda row: f"{row[when]:.1%}" if row["is_share"] else f"{row[when]:.3f}"


def _worse(row: Mapping) -> str | None:
    if not row["rank"]:
        return None
    return f"{100 * row['worse_than_full']:+.1f} points" if row["is_share"] else f"{row['worse_than_full']:+.3f}"


def _network(row: Mapping) -> str:
    """Returns the network between the nodes of a forecast."""
    return "one node" if row["layout"] == "1x8" else row["calibration"].partition("+")[2] or recipes.FAST


VALUES: dict[str, Callable[[Mapping], Any]] = {
    "options_or_why_not": _options,
    "mean_and_sigma": lambda row: row["forecast_lengths"].replace(",", ", "),
    "fits": lambda row: not row["why_not"],
    "published_s": lambda row: float(row["sec_per_iter"]),
    "fastest_peer_tokens_per_s": lambda row: max(row["peers_tokens_per_s"].values()),
    "kernel_name": lambda row: row["kernel"].partition(".")[2].strip("_").removesuffix("_kernel"),
    "what_trains": lambda row: f"rank {row['rank']}" if row["rank"] else "all weights",
    "measured_in": lambda row: {"mean@1": "right", "loss": "nats per token", "accuracy": "right"}[row["measure"]],
    "worse_shown": _worse,
    "network_of_calibration": _network,
    "roofline_share": lambda row: row["roofline_s"] / row["derived_s"],
    "method_shown": lambda row: row["method"] if row["method"].startswith("APP") else f"`{row['method']}`",
    "decoded_at_once": lambda row: row["decode_mini_batches"] or "all",
    "with_plan": lambda row: cell("{planner:,.1f}", row) + (f" ({row['plan']})" if row["plan"] else ""),
    "strategy_or_none": lambda row: f"`{row['strategy']}`" if row["strategy"] else "does not fit",
    "others_times_as_long": recipes.others,
    "full_training_s": lambda row: f"{row['full_s']:,.1f}" if row["full_s"] else "does not fit",
    **{f"{when}_shown": _measure(when) for when in ("first", "last", "worst", "before", "after")},
}


class _Row(dict):
    """A row whose missing values are made."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(key, default) if key in self or key not in VALUES else VALUES[key](self)


def _cell(template: str, row: Mapping[str, Any]) -> str:
    return cell(template, _Row(row))


# ---- tables ----------------------------------------------------------------------------------------------------------


def _columns(name: str) -> dict[str, str]:
    """Returns heading -> format string of a table, with the tables that it takes in."""
    found: dict[str, str] = {}
    for heading, template in reduce(getitem, name.split("."), TABLES).items():
        found |= _columns(heading[1:]) if heading.startswith("@") else {heading: template}
    return found


def _read(name: str) -> Columns:
    return {heading: partial(_cell, template) for heading, template in _columns(name).items()}


TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
COLUMNS: dict[str, Columns] = {name: _read(name) for name in TABLES if name not in ("parts", "joined")}
JOINS: dict[str, tuple[str, Callable[[Sequence[dict]], list[dict]]]] = {  # the file, what joins its rows
    **{name: (name, by_place) for name in ("scan", "spread")},
    **{name: ("baselines", times_faster) for name in ("baselines_factors", "baselines_seconds")},
    "stages": ("stages", by_stage),
    "ahead": ("ahead", joined_ahead),
    "lag": ("lag", paired),
    **{f"recipes_{name}": ("recipes", partial(recipes.of_algorithm, name)) for name in ("ppo", "grpo")},
    "recipes_slow": ("recipes", recipes.slow),
    "recipes_lora": ("recipes", recipes.adapted),
    "recipes_strategies": ("recipes", recipes.by_strategy),
    "adapters": ("adapters", by_rank_of_adapters),
    "validate_searched": ("validate", lambda rows: [row for row in rows if "ratio" in row]),
    "validate_systems": ("validate", by_system),
    **{name: (name, by_case) for name in ("against_trl", "against_trl_given")},
}
JOINED: dict[str, Joined] = {name: (*join, _read(f"joined.{name}")) for name, join in JOINS.items()}
