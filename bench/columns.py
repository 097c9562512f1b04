"""The columns of the tables in documents and terminals: a heading, and a cell as a function of a row."""

from collections.abc import Callable, Sequence

from bench import ahead_tables, baseline_tables, planner_tables, recipe_tables, stage_tables, trl_table
from bench.cells import number, percent
from bench.rows import STRATEGIES


def by_place(rows: Sequence[dict]) -> list[dict]:
    """One row for each model, layout, calibration and distribution of lengths: its samples per second by strategy."""
    names, places = ("preset", "layout", "calibration", "forecast_lengths"), {}
    for row in rows:
        place = places.setdefault(tuple(row.get(name) for name in names), {name: row.get(name) for name in names})
        place[row["strategy"]] = row["samples_per_s"]
    return list(places.values())


def by_system(rows: Sequence[dict]) -> list[dict]:
    """One row for each system whose published runs were forecast, and for each way in which the constants came to
    them."""
    errors: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        errors.setdefault((row["system"], row["seconds_are"]), []).append(abs(row["error"]))
    return [
        {"system": system, "seconds_are": how, "rows": len(found), "mean": sum(found) / len(found), "worst": max(found)}
        for (system, how), found in sorted(errors.items())
    ]


def by_rank_of_adapters(rows: Sequence[dict]) -> list[dict]:
    """One row for each task and rank of adapters: means over seeds, and the worst of them."""
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


def _gib(num_bytes: int | None) -> str:
    return number(None if num_bytes is None else num_bytes / 2**30)


def _options(row: dict) -> str:
    """The options of a forecast, or why there is none; of a plan, its name."""
    if row["samples_per_s"] is None:
        return row["why_not"]
    options = {"plan": row["options"]["plan"]} if "plan" in row["options"] else row["options"]
    words = ((name, ",".join(one) if isinstance(one, list | tuple) else str(one)) for name, one in options.items())
    return " ".join(f"{name}={word}" for name, word in words if word)


def _phase(name: str) -> Callable[[dict], str]:
    return lambda row: number(row["device_s"][name] if "device_s" in row else None)


def _measure(when: str) -> Callable[[dict], str]:
    """Shares as percentages, other measures as numbers."""
    return lambda row: f"{row[when]:.1%}" if row["is_share"] else f"{row[when]:+.3f}".removeprefix("+")


def _signed(row: dict) -> str:
    return f"{100 * row['worse_than_full']:+.1f} points" if row["is_share"] else f"{row['worse_than_full']:+.3f}"


Columns = dict[str, Callable[[dict], str]]
PLACE: Columns = {
    "model": lambda row: row["preset"],
    "layout": lambda row: row["layout"],
    "strategy": lambda row: f"`{row['strategy']}`",
}
SPEED: Columns = {
    "samples/s": lambda row: number(row["samples_per_s"], 2),
    "speed-up": lambda row: number(row["speed_up"], 2),
    "iteration, s": lambda row: number(row["iteration_s"]),
}
OPTIONS: Columns = {"options, or why not": _options}
PLACE_ALONE: Columns = {name: PLACE[name] for name in ("model", "layout")}


def rates(without: str = "") -> Columns:
    """Samples per second of each strategy. without: one that was not tried."""
    tried = (name for name in STRATEGIES if name != without)
    return {f"`{name}`": lambda row, name=name: number(row.get(name), 2) for name in tried}


def _lengths(row: dict) -> str:
    """Mean and sigma of a row's responses."""
    return row["forecast_lengths"].replace(",", ", ")


# tables that have one row for several: the file, what joins its rows, the columns
JOINED: dict[str, tuple[str, Callable[[Sequence[dict]], list[dict]], Columns]] = {
    "scan": ("scan", by_place, PLACE_ALONE | rates()),
    "adapters": (
        "adapters",
        by_rank_of_adapters,
        {
            "task": lambda row: f"`{row['task']}`",
            "trains": lambda row: f"rank {row['rank']}" if row["rank"] else "all weights",
            "share of the weights": lambda row: f"{row['trained_share']:.1%}",
            "measure": lambda row: {"mean@1": "right", "loss": "nats per token", "accuracy": "right"}[row["measure"]],
            "before": _measure("first"),
            "mean after": _measure("last"),
            "worst seed": _measure("worst"),
            "worse than all weights by": lambda row: _signed(row) if row["rank"] else "-",
            "seeds": lambda row: str(row["seeds"]),
        },
    ),
    "spread": ("spread", by_place, PLACE_ALONE | {"mean, sigma": _lengths} | rates(without="interleaving2")),
    "validate_searched": (
        "validate",
        lambda rows: [row for row in rows if "ratio" in row],
        {
            "actor": lambda row: f"{row['actor_b']}B",
            "GPUs": lambda row: row["n_gpus"],
            "new tokens": lambda row: row["gen_len"],
            "seconds are": lambda row: row["seconds_are"],
            "forecast, s": lambda row: number(row["forecast_s"]),
            "published, s": lambda row: number(float(row["sec_per_iter"])),
            "error": lambda row: f"{row['error']:+.1%}",
            "times as fast as the heuristic plan": lambda row: number(row["ratio"], 2),
            "published": lambda row: number(row["published_ratio"], 2),
            "in this planner's space, s": lambda row: number(row["own_space_s"]),
        },
    ),
    "validate_systems": (
        "validate",
        by_system,
        {
            "system": lambda row: row["system"],
            "seconds are": lambda row: row["seconds_are"],
            "published rows": lambda row: str(row["rows"]),
            "mean error": lambda row: percent(row["mean"]),
            "worst": lambda row: percent(row["worst"]),
        },
    ),
}
SCANS: dict[str, Columns] = {
    "scan": {
        **PLACE,
        **SPEED,
        **{f"{name}, s": _phase(name) for name in ("generation", "inference", "training", "rest")},
        "GiB": lambda row: _gib(row.get("peak_bytes")),
        **OPTIONS,
    },
    "app_memory": {
        **PLACE,
        "zero": lambda row: str(row["options"]["zero"]),
        "most on a device, GiB": lambda row: _gib(row["peak_bytes"]),
        "of it reference and reward": lambda row: _gib(row["frozen_bytes"]),
        "of it shadow copies": lambda row: _gib(row["shadow_bytes"]),
        "fits": lambda row: "no" if row["why_not"] else "yes",
    },
    "convergence": {
        "ranks": lambda row: str(row["ranks"]),
        "strategy": lambda row: f"`{row['strategy']}`",
        "reward, first iteration": lambda row: f"{row['rewards'][0]:+.4f}",
        "last": lambda row: f"{row['rewards'][-1]:+.4f}",
        "KL, last": lambda row: f"{row['kls'][-1]:.4f}",
        "largest difference": lambda row: f"{row['difference']:.1e}",
    },
}
SCANS["baselines"] = {"calibration": lambda row: row["calibration"], **SCANS["scan"]}
SCANS["algorithms"] = {"algorithm": lambda row: f"`{row['algorithm']}`", **SCANS["scan"]}
SCANS["stages"] = {"calibration": lambda row: row["calibration"], **SCANS["algorithms"]}
SCANS["spread"] = {"mean, sigma": _lengths, **SCANS["scan"]}
SCANS["ahead"] = SCANS["scan"]
SCANS |= trl_table.COLUMNS | planner_tables.COLUMNS
SCANS |= recipe_tables.COLUMNS | ahead_tables.COLUMNS
JOINED |= ahead_tables.JOINED | trl_table.JOINED | baseline_tables.JOINED | stage_tables.JOINED | recipe_tables.JOINED
GENERATED = {
    "model": lambda row: row["model"],
    "precision": lambda row: row["dtype"],
    "responses": lambda row: f"{row['requests']}, {row['work']}",
    "tokens/s": lambda row: f"{row['ours_tokens_per_s']:,.0f}",
}
AHEAD = {
    "times faster": lambda row: f"{row['ratio']:.2f}",
    "promised": lambda row: f"{row['promised']:g}",
}
COLUMNS: dict[str, Columns] = SCANS | {
    "invariance": {
        "algorithm": lambda row: f"`{row['algorithm']}`",
        "ranks": lambda row: str(row["ranks"]),
        "strategy": lambda row: f"`{row['strategy']}`",
        "options": lambda row: row["options"] or "-",
        "tokens of 3 seeds": lambda row: "identical" if row["same_tokens"] else "different",
        "largest error of losses, norms, KL, reward": lambda row: f"{row['metrics_error']:.1e}",
        "of the weights": lambda row: f"{row['weights_error']:.1e}",
    },
    "generate_adapters": {
        "model": lambda row: row["model"],
        "precision": lambda row: row["dtype"],
        "products": lambda row: f"`{row['products']}`",
        "rank": lambda row: str(row["rank"]),
        "rows": lambda row: str(row["rows"]),
        "tokens per second of a processor": lambda row: f"{row['processor_tokens_per_s']:,.0f}",
        "of the model without adapters": lambda row: f"{row['ratio']:.2f}",
        "by seconds": lambda row: f"{row['ratio_by_seconds']:.2f}",
        "promised": lambda row: f"{row['promised']:g}",
        "joined": lambda row: number(row.get("joined_ratio"), 2),
        "joined, by seconds": lambda row: number(row.get("joined_ratio_by_seconds"), 2),
        "copies, MiB": lambda row: number(row["joined_bytes"] / 2**20 if "joined_bytes" in row else None),
    },
    "bfloat16": {
        "algorithm": lambda row: f"`{row['algorithm']}`",
        "ranks": lambda row: str(row["ranks"]),
        "strategy": lambda row: f"`{row['strategy']}`",
        "reward, first iteration": lambda row: f"{row['rewards'][0]:+.3f}",
        "tenth": lambda row: f"{row['rewards'][-1]:+.3f}",
        "difference from one rank, in standard errors": lambda row: f"{row['difference']:.2f}",
    },
    "overlap": {
        "strategy": lambda row: f"`{row['strategy']}`",
        "slowed calls alone, s": lambda row: f"{row['slowed_s']:.2f}",
        "critical path, s": lambda row: f"{row['forecast_s']:.2f}",
        "measured, s": lambda row: f"{row['measured_s']:.2f}",
        "ratio": lambda row: f"{row['ratio']:.2f}",
    },
    "tool_waits": {
        "episodes": lambda row: str(row["rows"]),
        "places": lambda row: str(row["places"]),
        "tokens/s without waits, in 64 places": lambda row: f"{row['plain_tokens_per_s']:,.0f}",
        **{
            f"share of it, first {part}%" if part < 100 else "share of it, all tokens": (
                lambda row, part=part: f"{row[f'share_{part}']:.2f}"
            )
            for part in (50, 80, 100)
        },
    },
    "strategies": {
        "ranks": lambda row: str(row["ranks"]),
        "strategy": lambda row: f"`{row['strategy']}`",
        "options": lambda row: row["options"] or "-",
        "iteration, s": lambda row: f"{row['iteration_s']:.2f}",
        "moved, KiB": lambda row: f"{row['moved_bytes'] / 1024:,.0f}",
        "messages": lambda row: str(row["moved_messages"]),
        "most held by a rank, MiB": lambda row: f"{row['static_bytes'] / 2**20:.1f}",
        "computing": lambda row: percent(row["compute_share"]),
        "waiting for peers": lambda row: percent(row["waiting_share"]),
        "control": lambda row: percent(row["control_share"]),
    },
    "reallocation": {
        "pair": lambda row: row["pair"],
        "weights, MB": lambda row: f"{row['weight_bytes'] / 1e6:.0f}",
        "moved, MB": lambda row: f"{row['moved_bytes'] / 1e6:.1f}",
        "lower bound, MB": lambda row: f"{row['lower_bound_bytes'] / 1e6:.1f}",
        "reallocation, s": lambda row: f"{row['ours_s']:.3f}",
        "by sockets alone, s": lambda row: f"{row['sockets_s']:.3f}",
        "gather and broadcast, s": lambda row: f"{row['baseline_s']:.3f}",
        "speed-up": lambda row: f"{row['speed_up']:.1f}",
        "extra memory, MiB": lambda row: f"{row['extra_bytes'] / 2**20:.1f}",
    },
    "generate": {
        **GENERATED,
        "transformers": lambda row: f"{max(row['peers_tokens_per_s'].values()):,.0f}",
        **AHEAD,
        "share of the floor": lambda row: percent(row.get("share_of_floor")),
    },
    "against_vllm": {
        **GENERATED,
        "vLLM": lambda row: f"{row['peers_tokens_per_s']['vllm']:,.0f}",
        **AHEAD,
        "not counted, s: first pass; vLLM loads, first pass": lambda row: (
            f"{row['ours_first_s']:.0f}; {row['peer_load_s']:.0f}, {row['peer_first_s']:.0f}"
        ),
        "processor": lambda row: ", ".join(row["processor"]),
    },
    "kernels": {
        "kernel": lambda row: f"`{row['kernel']}`",
        "shape": lambda row: row["shape"],
        "precision": lambda row: row["dtype"],
        "ms": lambda row: f"{1e3 * row['ours_s']:.2f}",
        "times faster than": lambda row: ", ".join(f"{name} {x:.2f}" for name, x in row["times_faster"].items()),
        "of memory bandwidth": lambda row: percent(row.get("share_of_memory")),
        "of matrix rate": lambda row: percent(row.get("share_of_matrix")),
        "extra memory, of full logits": lambda row: percent(row.get("peak_share")),
    },
    "kernels_static": {
        "kernel": lambda row: f"`{row['kernel'].partition('.')[2].strip('_').removesuffix('_kernel')}`",
        "call": lambda row: row["what"],
        "shape": lambda row: row["shape"],
        "registers": lambda row: str(row["sm_90"]["registers"]),
        "spilled, bytes": lambda row: str(row["sm_90"]["spill_bytes"]),
        "shared, KiB": lambda row: number(row["sm_90"]["shared_bytes"] / 1024),
        "occupancy": lambda row: f"{row['sm_90']['occupancy']:.0%}",
        "waves": lambda row: number(row["waves"], 2),
        "gfx942: registers, spilled bytes, shared KiB": lambda row: "{registers}, {spill_bytes}, {:.1f}".format(
            row["gfx942"]["shared_bytes"] / 1024, **row["gfx942"]
        ),
        "needed, MB": lambda row: number(row["needed_bytes"] / 1e6, 2),
        "moved for each": lambda row: number(row["moved_per_needed"], 3),
        "forecast, us": lambda row: number(1e6 * row["forecast_s"], 2),
        "bound by": lambda row: row["bound_by"],
        "what is read again": lambda row: row["reason"] or "-",
    },
    "validate": {
        "system": lambda row: row["system"],
        "seconds are": lambda row: row["seconds_are"],
        "actor, critic": lambda row: f"{row['actor_b']}B, {row['critic_b']}B",
        "GPUs": lambda row: row["n_gpus"],
        "new tokens": lambda row: row["gen_len"],
        "forecast, s": lambda row: f"{row['forecast_s']:.1f}",
        "published, s": lambda row: f"{float(row['sec_per_iter']):.1f}",
        "error": lambda row: f"{row['error']:+.1%}",
    },
    "measure_cpu": {
        "algorithm": lambda row: row["algorithm"],
        "ranks": lambda row: str(row["ranks"]),
        "strategy": lambda row: f"`{row['strategy']}`",
        "forecast, s": lambda row: f"{row['forecast_s']:.2f}",
        "measured, s": lambda row: f"{row['measured_s']:.2f}",
        "error": lambda row: f"{row['error']:+.0%}",
    },
    "lengths": {
        "algorithm": lambda row: row["algorithm"],
        "ranks": lambda row: str(row["ranks"]),
        "strategy": lambda row: f"`{row['strategy']}`",
        "forecast, s": lambda row: f"{row['forecast_s']:.2f}",
        "measured, s": lambda row: f"{row['measured_s']:.2f}",
        "error": lambda row: f"{row['error']:+.1%}",
        "of equal lengths, s": lambda row: f"{row['of_mean_s']:.2f}",
        "its error": lambda row: f"{row['error_of_mean']:+.0%}",
    },
    "faults": {
        "algorithm": lambda row: f"`{row['algorithm']}`",
        "strategy": lambda row: f"`{row['strategy']}`",
        "ranks": lambda row: str(row["ranks"]),
        "points": lambda row: str(row["points"]),
        "resumed to the same bits": lambda row: str(row["equal"]),
        "dead rank named": lambda row: f"{row['named']} of {row['killed']}",
        "hangs": lambda row: str(row["hangs"]),
        "orphans": lambda row: str(row["orphans"]),
        "slowest end, s": lambda row: f"{row['slowest_end_s']:.1f}",
    },
    "soak": {
        "strategy": lambda row: f"`{row['strategy']}`",
        "ranks": lambda row: str(row["ranks"]),
        "iterations": lambda row: str(row["iterations"]),
        "kills": lambda row: str(row["kills"]),
        "same bits": lambda row: "yes" if row["equal"] else "no",
        "dead rank named": lambda row: f"{row['named']} of {row['kills']}",
        "hangs, orphans": lambda row: f"{row['hangs']}, {row['orphans']}",
        "memory, MB": lambda row: f"{row['first_bytes'] / 1e6:,.0f} to {row['last_bytes'] / 1e6:,.0f}",
        "seconds with kills, without": lambda row: f"{row['disturbed_s']:.0f}, {row['alone_s']:.0f}",
    },
    "endings": {
        "kind": lambda row: row["kind"],
        "ranks": lambda row: str(row["ranks"]),
        "launches": lambda row: str(row["launches"]),
        "status other than 0": lambda row: str(row["failed"]),
        "seconds each": lambda row: f"{row['seconds']:.1f}",
    },
    "iteration_size": {
        "what": lambda row: row["what"],
        "rows x tokens": lambda row: f"{row['rows']:,} x {row['tokens']:,}",
        "ranks": lambda row: str(row["ranks"]),
        "seconds": lambda row: f"{row['seconds']:.2f}",
        "of a processor": lambda row: f"{row['processor_s']:.2f}",
        "draws, of a processor": lambda row: f"{row['draws_processor_s']:.2f}" if "draws_s" in row else "",
        "memory, MB": lambda row: f"{row['grown_mb']:.0f}",
    },
    "guards": {
        "strategy": lambda row: f"`{row['strategy']}`",
        "ranks": lambda row: str(row["ranks"]),
        "iteration, s": lambda row: f"{row['iteration_s']:.2f}",
        "guards": lambda row: f"{row['guards']:+.1%}",
        "quartiles": lambda row: f"{row['guards_low']:+.1%} to {row['guards_high']:+.1%}",
        "training waits for a checkpoint": lambda row: f"{row['stall']:.1%}",
        "slow-down in all": lambda row: f"{row['saving']:+.1%}",
    },
    "demo_grpo_seeds": {
        "seed": lambda row: str(row["seed"]),
        "right before, greedy": lambda row: f"{row['accuracy_first']:.1%}",
        "right after": lambda row: f"{row['accuracy_last']:.1%}",
        "iterations": lambda row: str(row["iterations"]),
        "seconds of the command": lambda row: f"{row['command_s']:.0f}",
        "of a processor": lambda row: f"{row['processor_s']:.0f}",
    },
    "demo_tools_seeds": {
        "seed": lambda row: str(row["seed"]),
        "right before": lambda row: f"{row['accuracy_first']:.1%}",
        "without a tool": lambda row: f"{row['without_tools']:.1%}",
        "right after": lambda row: f"{row['accuracy_last']:.1%}",
        "of new numbers, too": lambda row: f"{row['unseen']:.1%} of {row['num_unseen']}",
        "iterations": lambda row: str(row["iterations"]),
        "seconds of the command": lambda row: f"{row['command_s']:.0f}",
        "of a processor": lambda row: f"{row['processor_s']:.0f}",
    },
    "demo_seeds": {
        "seed": lambda row: str(row["seed"]),
        "reward, first iteration": lambda row: f"{row['reward_first']:+.3f}",
        "its std": lambda row: f"{row['reward_std_first']:.3f}",
        "reward, last iteration": lambda row: f"{row['reward_last']:+.3f}",
        "gain in std": lambda row: f"{row['gain_in_std']:.2f}",
        "largest KL, nats": lambda row: f"{row['kl_largest']:.2f}",
        "seconds": lambda row: f"{row['wall_s']:.0f}",
    },
    "pipeline": {
        "stage": lambda row: row["stage"],
        "measure, on held-out data": lambda row: row["measure"],
        "before": _measure("before"),
        "after": _measure("after"),
    },
}
