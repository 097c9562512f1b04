"""The columns of the tables in documents and terminals: a heading, and a cell as a function of a row (columns.toml)."""

import math
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

from bench.cells import ROWS, Row, cell, grouped, matching
from bench.rows import SHIPPED, clean_rows

Columns = dict[str, Callable[[dict], str]]
Rows = Sequence[Mapping]
FAST = "200g-per-gpu"  # the network between nodes, if a calibration names no other one
LORA = "+lora"  # behind the name of an algorithm: with adapters


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


def _adapters(field: str) -> Callable[[Mapping], str]:
    """Formats a summary of the seeds of a task, of which only SFT's loss is no share."""
    return lambda row: cell(f"{{{field}:.3f}}" if row["task"] == "sft" else f"{{{field}:.1%}}", row)


def _worse(row: Mapping) -> str | None:
    if not row["rank"]:
        return None
    if row["task"] == "sft":
        return f"{row['worse_than_full']:+.3f}"
    return f"{100 * row['worse_than_full']:+.1f} points"


def _network(row: Mapping) -> str:
    """Returns the network between the nodes of a forecast."""
    return "one node" if row["layout"] == "1x8" else row["calibration"].partition("+")[2] or FAST


def _work(row: Mapping) -> str:
    """Returns the lengths and epochs of a forecast, in words."""
    options = dict(word.split("=", 1) for word in row["overrides"].split())
    mean, _, sigma = options["forecast_lengths"].partition(",")
    lengths = f"lognormal, mean {mean}, sigma {sigma}" if sigma else f"all {mean}"
    return f"{lengths}; epochs {options['ppo.epochs']}"


def _others(row: Mapping) -> str:
    """Returns the other strategies that fit, the fastest first, by their seconds over those of the recipe."""
    if not row["strategy"]:
        return ""
    fitting = {name: one["iteration_s"] for name, one in row["strategies"].items() if "iteration_s" in one}
    found = sorted((seconds, name) for name, seconds in fitting.items() if name != row["strategy"])
    return ", ".join(f"{name} {seconds / row['iteration_s']:.2f}" for seconds, name in found)


def _limit(row: Mapping) -> str | None:
    """Returns what limits the training of a row."""
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


def _shipped(row: Mapping) -> Mapping:
    """Returns the fastest shipped strategy of a group that fits."""
    fit = matching(row[ROWS], {"iteration_s": True, "strategy": list(SHIPPED)})
    return min(fit, key=lambda one: one["iteration_s"], default=Row())


def _overlapped_s(row: Mapping) -> float:
    """Returns the seconds of an iteration whose messages all move during computation: nothing is faster."""
    return max(row["without_messages_s"], row["iteration_s"] - row["without_messages_s"])


Row.values = {
    "options_or_why_not": _options,
    "mean_and_sigma": lambda row: row["forecast_lengths"].replace(",", ", "),
    "fits": lambda row: not row["why_not"],
    "published_s": lambda row: float(row["sec_per_iter"]),
    "fastest_peer_tokens_per_s": lambda row: max(row["peers_tokens_per_s"].values()),
    "what_trains": lambda row: f"rank {row['rank']}" if row["rank"] else "all weights",
    "measured_in": lambda row: {"mean@1": "right", "loss": "nats per token", "accuracy": "right"}[row["measure"]],
    "worst_shown": lambda row: _adapters("max last" if row["task"] == "sft" else "min last")(row),
    "worse_shown": _worse,
    "network_of_calibration": _network,
    "roofline_share": lambda row: row["roofline_s"] / row["derived_s"],
    "method_shown": lambda row: row["method"] if row["method"].startswith("APP") else f"`{row['method']}`",
    "decoded_at_once": lambda row: row["decode_mini_batches"] or "all",
    "conventions": lambda row: row["difference"] or "the same",
    "strategy_or_none": lambda row: f"`{row['strategy']}`" if row["strategy"] else "does not fit",
    "others_times_as_long": _others,
    "full_training_s": lambda row: f"{row['full_s']:,.1f}" if row["full_s"] else "does not fit",
    "work_shown": _work,
    "train_limit": _limit,
    "plan_layouts": _plan,
    "shipped": _shipped,
    "overlapped_s": _overlapped_s,
    "first_mean_shown": _adapters("mean first"),
    "last_mean_shown": _adapters("mean last"),
    **{f"{when}_shown": _measure(when) for when in ("before", "after")},
}


# ---- rows that are joined in another way -----------------------------------------------------------------------------


def adapted(rows: Rows) -> list[dict]:
    """Returns the recipes with adapters, with the seconds of full training at the same place."""
    names = ("preset", "layout", "device_type", "network")
    seconds = {(row["algorithm"], *(row[name] for name in names)): row.get("iteration_s") for row in rows}
    found = []
    for row in rows:
        algorithm = row["algorithm"].removesuffix(LORA)
        if algorithm != row["algorithm"]:
            full_s = seconds[algorithm, *(row[name] for name in names)]
            found.append({**row, "algorithm": algorithm, "full_s": full_s})
    return found


def recipes_by_strategy(rows: Rows) -> list[dict]:
    """Returns one row for each strategy, algorithm and kind of machine: how often it fits and is the recipe, and how
    long it takes compared with the recipe."""
    tried = []
    for row in rows:
        if row["strategy"] and not row["algorithm"].endswith(LORA):
            where = "one node" if row["layout"].startswith("1x") else f"several, {row['network']}"
            for name, about in row["strategies"].items():
                times = about["iteration_s"] / row["iteration_s"] if "iteration_s" in about else None
                one = {"algorithm": row["algorithm"], "where": where, "strategy": name, "times": times}
                tried.append(one | {"chosen": row["strategy"] == name})
    return grouped(tried, ("algorithm", "where", "strategy"))


# of runs of `bench lag`
MEASURE = "accuracy_mean"  # of a run of bench lag: of its evaluations after training has begun
MEASURES = {"": MEASURE, "last_": "accuracy_last"}  # what is compared, by what its differences are called
OF_PAIR = ("page", "actor_lr", "warmup")  # what both runs of a pair have, and the seed
OF_PLACE = (*OF_PAIR, "lag", "correction")
NATS = {"nats": "parity_mean_abs", "largest_nats": "parity_mean_abs_largest"}  # of an iteration's lag: mean, largest
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # of Student's distribution, by the number of pairs


def paired(rows: Sequence[Mapping]) -> list[dict]:
    """Returns, of every algorithm, rate, warm-up, lag and correction that has two seeds at least: the number of seeds,
    the mean difference of each measure from lag 0, half of its 95% interval, and the mean over the seeds of the lag in
    nats, where every row has it."""
    places: dict[tuple, list[tuple[Mapping, Mapping]]] = {}
    base = {tuple(row[name] for name in (*OF_PAIR, "seed")): row for row in rows if row["lag"] == 0}
    for row in rows:
        if row["lag"] and (alone := base.get(tuple(row[name] for name in (*OF_PAIR, "seed")))):
            places.setdefault(tuple(row[name] for name in OF_PLACE), []).append((row, alone))
    made = []
    for place, pairs in places.items():
        if (num := len(pairs)) < 2:
            continue
        one: dict = dict(zip(OF_PLACE, place, strict=True)) | {"seeds": num}
        for prefix, measure in MEASURES.items():
            differences = [row[measure] - alone[measure] for row, alone in pairs]
            one[f"{prefix}difference"] = statistics.fmean(differences)
            one[f"{prefix}half"] = T_95[num] * statistics.stdev(differences) / math.sqrt(num)
        for name, measure in NATS.items():
            found = [row[measure] for row, _ in pairs if measure in row]
            one[name] = statistics.fmean(found) if len(found) == num else None
        made.append(one)
    return made


# ---- tables ----------------------------------------------------------------------------------------------------------


def _columns(name: str) -> dict[str, str]:
    """Returns heading -> format string of a table, with the tables that it takes in."""
    found: dict[str, str] = {}
    for heading, template in reduce(getitem, name.split("."), TABLES).items():
        found |= _columns(heading[1:]) if heading.startswith("@") else {heading: template}
    return found


def _read(name: str) -> Columns:
    return {heading: partial(cell, template) for heading, template in _columns(name).items()}


def joined(rows: Rows, where: Mapping = {}, by: Sequence[str] = (), across: str = "{strategy}", **_: str) -> Rows:
    """Returns the rows with some values; with `by` one for all that have the same values of these names."""
    found = matching(rows, where)
    return grouped(found, by, across) if by else found


def quoted(template: str, file: str, **join: Any) -> str:
    """Returns what a document quotes of the rows of a file, joined as in a table: a format string of their only one, or
    of the group of all."""
    rows = joined(clean_rows(file), **join)
    assert rows, f"bench/results/{file}.jsonl has no rows {join}"
    return cell(template, rows[0] if len(rows) == 1 else {ROWS: rows})


TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
COLUMNS: dict[str, Columns] = {name: _read(name) for name in TABLES if name not in ("parts", "joined", "joins")}
JOINS: dict[str, dict] = TABLES["joins"]
JOINED: dict[str, Columns] = {name: _read(f"joined.{name}") for name in TABLES["joined"]}
SPECIAL = {"recipes_lora": adapted, "recipes_strategies": recipes_by_strategy, "lag": paired}


def table(name: str) -> tuple[Columns, Rows, Rows]:
    """Returns the columns of a table, its rows, and the rows of results that they come from."""
    join = JOINS.get(name, {})
    rows = clean_rows(join.get("file", name))
    if name in SPECIAL:
        return JOINED[name], SPECIAL[name](rows), rows
    return JOINED.get(name) or COLUMNS[name], joined(rows, **{"by": ()} | join), rows
