"""The numbers of README.md's section on evidence, each from the rows of a bench, with the kind of number."""

from bench.rows import clean_rows

COLUMNS = {
    "statement": lambda row: row[0],
    "number": lambda row: row[1],
    "kind": lambda row: row[2],
    "rows": lambda row: f"[rows](bench/RESULTS.md#{row[3]})",
}
SCAN_PLACE = ("llama-13b", "2x8")  # the forecast that is quoted
CPU = "measured, CPU"
Line = tuple[str, str, str, str]  # statement, number, kind, section of RESULTS.md


def table() -> tuple[dict, list[Line]]:
    """Returns its columns, and a row for each number."""
    return COLUMNS, [same_tokens(), kills(), generation(), against_vllm(), against_trl(), published(), planner()]


def same_tokens() -> Line:
    found = [row for row in clean_rows("invariance") if row["ranks"] > 1]
    same, worst = [row for row in found if row["same_tokens"]], max(row["metrics_error"] for row in found)
    algorithms = {row["algorithm"].partition("+")[0] for row in found}
    statement = (
        f"Placements that drew the tokens of one rank ({len(algorithms)} algorithms, float32); largest relative error "
        "of losses, norms, KL and reward"
    )
    return statement, f"{len(same)} of {len(found)}; {worst:.1e}", CPU, "the-same-numbers-everywhere"


def kills() -> Line:
    found = clean_rows("faults")
    total = {key: sum(row[key] for row in found) for key in ("points", "equal", "hangs", "orphans")}
    statement = (
        "Runs that were killed at a random moment and, resumed, ended with the bits of an uninterrupted run; hangs; "
        "orphans"
    )
    return statement, "{equal:,} of {points:,}; {hangs}; {orphans}".format(**total), CPU, "kills"


def generation() -> Line:
    ratios = [row["ratio"] for row in clean_rows("generate")]
    statement = "Tokens per second of generation, relative to `generate` of transformers"
    return statement, f"{min(ratios):.1f} to {max(ratios):.1f}", CPU, "generation"


def against_vllm() -> Line:
    rows = clean_rows("against_vllm")
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["dtype"], []).append(f"{row['ratio']:.2f}")
    numbers = "; ".join(f"{dtype}: {equal}, {spread}" for dtype, (equal, spread) in found.items())
    statement = (
        "Tokens per second of generation with SmolLM2-135M, relative to vLLM's CPU backend: responses of equal length, "
        "of spread lengths"
    )
    return statement, numbers, CPU, "generation-against-vllm"


def against_trl() -> Line:
    ratios: dict[str, list[float]] = {}
    for row in clean_rows("against_trl_steps"):  # of TRL with and without its recomputation of activations
        ratios.setdefault(row["work"], []).append(row["ratio"])
    least = {work: f"{min(found):.2f}" for work, found in ratios.items()}
    statement = (
        "Speed of a GRPO step with SmolLM2-135M in float32, relative to TRL (`python -m bench against-trl steps`): "
        "responses of equal length, of spread lengths, the smaller ratio to two settings of TRL"
    )
    return statement, f"{least['full length']}, {least['spread lengths']}", CPU, "speed-of-whole-steps-against-trl"


def published() -> Line:
    errors = {"fitted": [], "held out": []}
    for row in clean_rows("validate"):
        if row["seconds_are"] in errors:
            errors[row["seconds_are"]].append(abs(row["error"]))
    counts, means = ([f(found) for found in errors.values()] for f in (len, lambda found: sum(found) / len(found)))
    statement = (
        f"Mean error of forecast iteration times against those that ReaL published: on the {counts[0]} runs to which "
        f"five constants are fitted; on {counts[1]} held-out runs"
    )
    return statement, "; ".join(f"{100 * mean:.1f}%" for mean in means), "fitted; forecast", "published-runs"


def planner() -> Line:
    model, layout = SCAN_PLACE
    found = {
        row["strategy"]: row["samples_per_s"]
        for row in clean_rows("scan")
        if (row["preset"], row["layout"]) == SCAN_PLACE and row["samples_per_s"]
    }
    best = max((name for name in found if name != "planner"), key=found.__getitem__)
    statement = (
        f"Samples per second of the planner's placement for {model} on {layout} A100s; of the best shipped strategy, "
        f"`{best}`"
    )
    number = f"{found['planner']:.1f}; {found[best]:.1f}"
    return statement, number, "forecast", "forecasts-of-the-strategies"
