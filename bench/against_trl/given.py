"""The same step on the same rows of responses: does TRL read the same tokens, and how far apart are the numbers?"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from bench.against_trl import ours
from bench.against_trl.equality import ERRORS, SMALL, THREADS, WITH_CASTS, errors, in_peer, perturbed_copy
from bench.against_trl.given_cases import MOST_TOKENS, PAD, TEMPLATE, GivenCase, Row
from rlhf_spmd.config.metric_aliases import TABLE
from tests.folders import WORDS, write_model

TOLERANCE = {"float64": 1e-7, WITH_CASTS: 3e-6}  # of the largest relative difference
METRICS = {"float64": 1e-7, WITH_CASTS: 1e-4}  # that of metrics: DPO's rewards are differences of sums of logprobs
SHOWN = ("loss_error", "metrics_error", "gradient_error", "weights_error")
EXTREMES = {"min_reward": "score_min", "max_reward": "score_max"}  # the same for one step only, so they have no alias
MICRO_BATCH = 5  # of ours; TRL takes all rows at once


@dataclass(frozen=True, slots=True)
class GivenSetting:
    """Models that both programs read, by role."""

    name: str
    models: Mapping[str, Path]


def small(folder: Path) -> list[GivenSetting]:
    """Random Llamas; the reward model has a head of its own."""
    settings = []
    for number, (name, shape) in enumerate(SMALL.items()):
        sizes = {**shape, "eos_token_ids": (1,)}
        models = {
            "actor": write_model(folder / f"actor-{number}", seed=1 + number, **sizes),
            "reward": write_model(
                folder / f"reward-{number}", head="scalar", seed=5 + number, **{**sizes, "tie_embeddings": False}
            ),
        }
        for model in models.values():
            about = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
            about |= {"pad_token": PAD, "chat_template": TEMPLATE}
            (model / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
        models["reference"] = perturbed_copy(models["actor"], folder / f"reference-{number}")
        settings.append(GivenSetting(name, models))
    return settings


def words(first: int, number: int) -> str:
    """A text of some words."""
    return " ".join(WORDS[(7 * first + 3 * place) % len(WORDS)] for place in range(number))


def our_words(setting: GivenSetting, case: GivenCase, path: Path, num_rows: int) -> list[str]:
    """The run of one case, as words of the command line."""
    found = [f"data.prompts={path}", f"data.max_prompt={MOST_TOKENS}", f"generation.max_new_tokens={MOST_TOKENS}"]
    found += [f"rollout_batch={num_rows}", f"mini_batch={num_rows}", f"micro_batch={MICRO_BATCH}"]
    found += [f"models.{case.role}={setting.models[case.role]}"]
    return found + ([f"models.reference={setting.models['reference']}"] if case.page == "dpo" else [])


def compared(setting: GivenSetting, cases: Sequence[GivenCase], folder: Path) -> list[dict]:
    """A row for each case and kind of casts."""
    steps: dict[tuple[str, bool], dict] = {}
    mine: dict[tuple[str, bool], ours.Taken] = {}
    for number, case in enumerate(cases):
        rows = case.rows(words)
        write_rows(rows, folder / f"rows-{number}.jsonl")
        (folder / f"rows-{number}.json").write_text(json.dumps(rows), encoding="utf-8")
        for wide in (True, False):
            told = our_words(setting, case, folder / f"rows-{number}.jsonl", len(rows))
            mine[case.name, wide] = ours.given_step(case, told, dtype="float64", wide=wide)
            steps[case.name, wide] = {
                "kind": case.page,
                "rows": str(folder / f"rows-{number}.json"),
                "model": str(setting.models[case.role]),
                "reference": str(setting.models["reference"]),
                "dtype": "float64",
                "wide": wide,
                "options": case.theirs,
                "out": str(folder / f"step-{number}-{wide}.safetensors"),
            }
    in_peer("bench.against_trl.trl_given", {"threads": THREADS, "steps": list(steps.values())}, folder)
    return [
        compared_step(setting, case, mine[case.name, wide], Path(steps[case.name, wide]["out"]), wide=wide)
        for case in cases
        for wide in (True, False)
    ]


def write_rows(rows: Sequence[Row], path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def compared_step(setting: GivenSetting, case: GivenCase, mine: ours.Taken, out: Path, *, wide: bool) -> dict:
    """The row of a step that both programs have taken."""
    with safe_open(out, "pt") as file:
        theirs = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        about = {name: json.loads(text) for name, text in file.metadata().items()}
    row = {"model": setting.name, "case": case.name, "precision": "float64" if wide else WITH_CASTS}
    row |= about_rows(mine) | errors(mine, about["loss"], theirs)
    found = metric_errors(case, mine.metrics, about["metrics"])
    row |= {"metrics": sorted(found), "metrics_error": max(found.values())}
    row |= {"same_tokens": same_tokens(case, mine.rows, about["rows"])}
    row |= {"tolerance": TOLERANCE[row["precision"]], "metrics_tolerance": METRICS[row["precision"]]}
    row |= {"difference": case.difference, "ok": is_equal(row)}
    print(show(row), flush=True)
    return row


def is_equal(row: Mapping) -> bool:
    """Whether both programs have read the same tokens and computed the same from them."""
    near = max(row[name] for name in ERRORS) <= row["tolerance"] and row["metrics_error"] <= row["metrics_tolerance"]
    return row["same_tokens"] and near


def about_rows(mine: ours.Taken) -> dict:
    """How many rows and learned tokens the step has, and the lengths of its sequences."""
    sequences = [sequence for row in mine.rows for sequence in row]
    lengths = [len(tokens) for tokens, _ in sequences]
    learned = sum(sum(marks) for _, marks in sequences)
    return {"rows": len(mine.rows), "shortest": min(lengths), "longest": max(lengths), "learned": learned}


def metric_errors(case: GivenCase, mine: Mapping, theirs: Mapping) -> dict[str, float]:
    """Relative differences of what both programs log, by TRL's names; ours are found by their aliases."""
    names = {
        alias.name.removeprefix("train/"): alias.ours[0] for alias in TABLE["trl"] if case.page in alias.algorithms
    }
    names |= EXTREMES
    shared = [name for name in names if name in theirs]
    return {name: abs(mine[names[name]] - theirs[name]) / max(abs(theirs[name]), 1e-300) for name in shared}


def same_tokens(case: GivenCase, mine: Sequence, theirs: Sequence) -> bool:
    """Whether both programs have the same rows, in any order: tokens, and which of them are learned. A reward model
    learns from scores, so only its tokens count."""
    marked = case.page != "reward_model"

    def in_order(rows: Sequence) -> list:
        return sorted([(list(tokens), list(marks) if marked else []) for tokens, marks in row] for row in rows)

    return in_order(mine) == in_order(theirs)


def show(row: Mapping) -> str:
    numbers = ", ".join(f"{name.removesuffix('_error')} {row[name]:.1e}" for name in SHOWN)
    tokens = "the same tokens" if row["same_tokens"] else "OTHER TOKENS"
    verdict = "" if row["ok"] else f"  NOT within {row['tolerance']:g} and {row['metrics_tolerance']:g}"
    return f"{row['model']}, {row['case']}, {row['precision']}: {numbers} ({row['worst']}); {tokens}{verdict}"
