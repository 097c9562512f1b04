"""Do the demos learn on five fixed seeds?

demo-seeds: `make demo`: PPO raises the mean reward by an initial standard deviation, at 10 nats of KL at most.
demo-grpo-seeds: `make demo-grpo`: GRPO raises the share of held-out problems solved to 85%, in a minute.
demo-mixture-seeds: the same with the embedded mixture of experts, `make demo-grpo MODEL=.../mixture/actor`: 90%, and no
    expert gets three times as many tokens as the mean one.
demo-tools-seeds: `make demo-tools`: GRPO raises the share of held-out questions answered right to 80%, in two minutes.
    The words of these questions are in no prompt. The row also has the share of those whose numbers and sign are in no
    prompt, either, and of what the first model answers right without a tool: in episodes of one turn.

Cost: five times the demo, two to six minutes.
Command: python -m bench demo-seeds (demo-grpo-seeds, demo-mixture-seeds, demo-tools-seeds) [--again] [KEY=VALUE ...]
"""

import math
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from bench.rows import Arguments, fill, read_rows, run, train
from bench.tables import ended
from rlhf_spmd import embedded

SEEDS = (0, 1, 2, 3, 4)
NUM_RANKS = 4
LARGEST_KL = 10.0  # nats per response


@dataclass(frozen=True, slots=True)
class Demo:
    """A demo that is repeated with several seeds.

    words: of its command.
    facts: of its result, metrics and run folder, for the row.
    ok: of the row.
    most_s: of a command, in the median.
    """

    words: tuple[str, ...]
    facts: Callable[[dict, list[dict], Path], dict]
    ok: Callable[[dict], bool]
    most_s: float = math.inf


def rewards(result: dict, metrics: list[dict], folder: Path) -> dict:
    first, last = metrics[0], metrics[-1]
    return {
        "reward_first": first["reward"],
        "reward_std_first": first["reward_std"],
        "reward_last": last["reward"],
        "gain_in_std": (last["reward"] - first["reward"]) / first["reward_std"],
        "kl_last": last["kl"],
        "kl_largest": max(row["kl"] for row in metrics),
        "parity_max_abs": result["parity_max_abs"],
        "wall_s": result["wall_s"],
    }


def accuracies(result: dict, metrics: list[dict], folder: Path) -> dict:
    return {f"accuracy_{when}": result[f"eval_mean@1_{when}"] for when in ("first", "last")}


def with_load(result: dict, metrics: list[dict], folder: Path) -> dict:
    return accuracies(result, metrics, folder) | {"largest_load": max(row["expert_load"] for row in metrics)}


def with_tools(result: dict, metrics: list[dict], folder: Path) -> dict:
    held_out, prompts = (read_rows(embedded.path_of(f"tools/{name}.jsonl")) for name in ("held_out", "prompts"))
    last = max((folder / "rollouts").glob("evaluation-*"))
    said = [one for part in sorted(last.glob("*.jsonl")) for one in read_rows(part)]
    new = unseen(said, held_out, prompts)
    row = {"without_tools": without_tools(), "num_unseen": len(new), "unseen": sum(new) / len(new)}
    return accuracies(result, metrics, folder) | row


@cache
def without_tools() -> float:
    """Returns the share of the held-out questions that the first model answers right in its first turn."""
    return run(NUM_RANKS, ["evaluate", "--preset", "tools", "--json", "episode.max_turns=1"])["mean@1"]


def unseen(said: list[dict], held_out: list[dict], prompts: list[dict]) -> list[float]:
    """Returns the scores of the answers to held-out questions whose numbers and sign no prompt has."""
    known = {numbers_of(one) for one in prompts}
    return [one["scores"] for one in said if numbers_of(held_out[one["prompt_index"]]) not in known]


def numbers_of(row: dict) -> tuple[int, str, int]:
    """Returns the numbers of a question such as `amo*tiv`, with the sign."""
    text = row["prompt"][0]["content"]
    return row["table"][text[:3]], text[3], row["table"][text[4:]]


DEMOS = {
    "demo-seeds": Demo((), rewards, lambda row: row["gain_in_std"] >= 1.0 and row["kl_largest"] <= LARGEST_KL),
    "demo-grpo-seeds": Demo(
        ("--preset", "arithmetic"),
        accuracies,
        lambda row: row["accuracy_first"] <= 0.5 and row["accuracy_last"] >= 0.85,
        most_s=60.0,
    ),
    "demo-mixture-seeds": Demo(
        ("--preset", "arithmetic", "--model", str(embedded.path_of("mixture/actor"))),
        with_load,
        lambda row: row["accuracy_first"] <= 0.5 and row["accuracy_last"] >= 0.9 and row["largest_load"] < 3.0,
    ),
    "demo-tools-seeds": Demo(
        ("--preset", "tools", "rollouts.every=1000"),  # all evaluations, and of the iterations the first one
        with_tools,
        lambda row: (
            row["accuracy_first"] <= 0.4
            and row["without_tools"] <= 0.1
            and min(row["accuracy_last"], row["unseen"]) >= 0.8
        ),
        most_s=120.0,
    ),
}


def measured(case: dict, demo: Demo, overrides: list[str]) -> dict:
    """Returns the row of a seed."""
    began, used = time.perf_counter(), _processor_s()
    with tempfile.TemporaryDirectory() as runs:
        words = [*demo.words, "--runs", runs, f"seed={case['seed']}", *overrides]
        result, metrics = train(NUM_RANKS, words)
        took = {"command_s": time.perf_counter() - began, "processor_s": _processor_s() - used}
        row = {"ranks": NUM_RANKS, "iterations": result["iterations"]} | took
        row |= demo.facts(result, metrics, Path(result["run_dir"]))
    return row | {"ok": demo.ok(row)}


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(arguments: list[str]) -> int:
    parser = Arguments(arguments[0], __doc__, fills=True)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE")
    parsed = parser.parse_args(arguments[1:])
    name, demo = arguments[0].replace("-", "_"), DEMOS[arguments[0]]
    rows = fill(name, [{"seed": seed} for seed in SEEDS], partial(measured, demo=demo, overrides=parsed.overrides))
    median_s, passed = statistics.median(row.get("command_s", 0.0) for row in rows), [row["ok"] for row in rows]
    return ended(arguments[0], rows, ok=all(passed) and median_s <= demo.most_s, passed=sum(passed), median_s=median_s)
