"""The numbers of README.md's section on evidence, each from the rows of a bench, with the kind of number."""

from collections.abc import Sequence

from bench.rows import clean_rows

COLUMNS = {
    "statement": lambda row: row["statement"],
    "number": lambda row: row["number"],
    "kind": lambda row: row["kind"],
    "rows": lambda row: f"[rows](bench/RESULTS.md#{row['section']})",
}
SCAN_PLACE = ("llama-13b", "2x8")  # the forecast that is quoted


def table() -> tuple[dict, list[dict[str, str]]]:
    """Its columns, and a row for each number."""
    return COLUMNS, [_same_tokens(), _kills(), _generation(), *_against_vllm(), _published(), _planner()]


def _row(statement: str, number: str, kind: str, section: str) -> dict[str, str]:
    return {"statement": statement, "number": number, "kind": kind, "section": section}


def _listed(values: Sequence) -> str:
    *first, last = map(str, values)
    return f"{', '.join(first)} and {last}" if first else last


def _same_tokens() -> dict[str, str]:
    found = [row for row in clean_rows("invariance") if row["ranks"] > 1]
    same, worst = [row for row in found if row["same_tokens"]], max(row["metrics_error"] for row in found)
    ranks, strategies = sorted({row["ranks"] for row in found}), dict.fromkeys(row["strategy"] for row in found)
    algorithms = {row["algorithm"].partition("+")[0] for row in found}
    return _row(
        "Placements in which a run sampled the same tokens as on one rank, of those tested in float32 with three seeds "
        f"({len(algorithms)} algorithms, PPO also with adapters; {_listed(tuple(strategies))}; {_listed(ranks)} "
        "ranks); largest relative error of their losses, norms, KL and reward",
        f"{len(same)} of {len(found)}; {worst:.1e}",
        "measured, CPU",
        "the-same-numbers-everywhere",
    )


def _kills() -> dict[str, str]:
    found = clean_rows("faults")
    total = {key: sum(row[key] for row in found) for key in ("points", "equal", "hangs", "orphans")}
    return _row(
        "Runs that were killed at a random moment and, resumed, ended with the bits of an uninterrupted run; hangs; "
        "orphans",
        "{equal} of {points}; {hangs}; {orphans}".format(**total),
        "measured, CPU",
        "kills",
    )


def _generation() -> dict[str, str]:
    ratios = [row["ratio"] for row in clean_rows("generate")]
    return _row(
        "Tokens per second of generation, relative to `generate` of transformers",
        f"{min(ratios):.1f} to {max(ratios):.1f}",
        "measured, CPU",
        "generation",
    )


def _against_vllm() -> list[dict[str, str]]:
    rows = clean_rows("against_vllm")
    found = {
        dtype: " and ".join(f"{row['ratio']:.2f}" for row in rows if row["dtype"] == dtype)
        for dtype in dict.fromkeys(row["dtype"] for row in rows)
    }
    return [
        _row(
            "Tokens per second of generation with SmolLM2-135M, relative to vLLM's CPU backend, in "
            f"{_listed(tuple(found))}, each with all responses as long as allowed and with spread lengths",
            "; ".join(found.values()),
            "measured, CPU",
            "generation-against-vllm",
        )
    ]


def _published() -> dict[str, str]:
    errors = {"fitted": [], "held out": []}
    for row in clean_rows("validate"):
        if row["seconds_are"] in errors:
            errors[row["seconds_are"]].append(abs(row["error"]))
    counts, means = ([f(found) for found in errors.values()] for f in (len, lambda found: sum(found) / len(found)))
    return _row(
        f"Mean error of forecast iteration times against those that ReaL published: on the {counts[0]} runs to which "
        f"five constants are fitted; on {counts[1]} held-out runs",
        "; ".join(f"{100 * mean:.1f}%" for mean in means),
        "fitted; forecast",
        "published-runs",
    )


def _planner() -> dict[str, str]:
    model, layout = SCAN_PLACE
    found = {
        row["strategy"]: row["samples_per_s"]
        for row in clean_rows("scan")
        if (row["preset"], row["layout"]) == SCAN_PLACE and row["samples_per_s"]
    }
    best = max((name for name in found if name != "planner"), key=found.__getitem__)
    return _row(
        f"Samples per second of the planner's placement for {model} on {layout} A100s; of the best shipped strategy, "
        f"`{best}`",
        f"{found['planner']:.1f}; {found[best]:.1f}",
        "forecast",
        "forecasts-of-the-strategies",
    )
