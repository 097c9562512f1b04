"""The same step by both programs: how far apart are loss, gradients, and weights after it? Where both read given
responses, do they read the same tokens, and how far apart are the metrics that both log?"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.against_trl import ours
from bench.against_trl.cases import KL, MOST_TOKENS, PAD, TEMPLATE, Case, Row
from bench.against_trl.work import REWARD
from rlhf_spmd.config.metric_aliases import TABLE
from tests.folders import WORDS, write_model

SMALL = {  # random Llamas
    "two layers": {"max_position_embeddings": 128},
    "three layers, tied": {
        "num_layers": 3,
        "num_heads": 6,
        "head_dim": 6,
        "hidden_size": 36,
        "tie_embeddings": True,
        "max_position_embeddings": 128,
    },
}
EOS = (1, 7, 20)  # so many that generated responses end at all lengths
LIMIT = 24  # most tokens of a generated response
WITH_CASTS = "float64 with casts"
TOLERANCE = 1e-7  # of the largest relative difference without casts
METRICS = {"float64": 1e-7, WITH_CASTS: 1e-4}  # of metrics: DPO's rewards are differences of sums of logprobs
ERRORS = ("loss_error", "gradient_error", "weights_error")
EXTREMES = {"min_reward": "score_min", "max_reward": "score_max"}  # the same for one step only, so they have no alias
SEED = 3
NEAR = 0.1  # the reference's distance from the actor, of the weights' standard deviation


@dataclass(frozen=True, slots=True)
class Setting:
    """Models that both programs read, by role."""

    name: str
    models: Mapping[str, Path]


def small(folder: Path, *, given: bool = False) -> list[Setting]:
    """Makes random Llamas.

    given: for given responses, which end with the end token; the reward model has a head of its own.
    """
    settings = []
    for number, (name, shape) in enumerate(SMALL.items()):
        sizes = shape | {"eos_token_ids": EOS[:1] if given else EOS}
        models = {"actor": write_model(folder / f"actor-{number}", seed=1 + number, **sizes)}
        if given:
            sizes |= {"tie_embeddings": False}
            models["reward"] = write_model(folder / f"reward-{number}", head="scalar", seed=5 + number, **sizes)
            for model in models.values():
                about = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
                about |= {"pad_token": PAD, "chat_template": TEMPLATE}
                (model / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
        models["reference"] = perturbed_copy(models["actor"], folder / f"reference-{number}")
        settings.append(Setting(name, models))
    return settings


def perturbed_copy(folder: Path, copy: Path) -> Path:
    """Makes a model near another one, so that the KL divergence between them is not 0."""
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    tensors, random = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(SEED)
    for name, tensor in tensors.items():
        spread = tensor.float().std() if tensor.dim() > 1 else tensor.float().abs().mean()
        tensors[name] = tensor + NEAR * spread * torch.randn(tensor.shape, generator=random)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


def text_of(first: int, number: int) -> str:
    """Returns a text of some words."""
    return " ".join(WORDS[(7 * first + 3 * place) % len(WORDS)] for place in range(number))


def words_of(setting: Setting, case: Case, folder: Path) -> list[str]:
    """Writes the data of one case into the folder. Returns the arguments of its run."""
    rows = case.rows(text_of) if case.rows else [{"prompt": text_of(i, 1 + i % 6)} for i in range(8)]
    words = [
        f"data.prompts={ours.written(rows, folder)}",
        f"models.{case.role}={setting.models[case.role]}",
        f"rollout_batch={len(rows)}",
    ]
    if case.page not in ("sft", "reward_model"):
        words.append(f"models.reference={setting.models['reference']}")
    if case.rows:
        words += [f"data.max_prompt={MOST_TOKENS}", f"generation.max_new_tokens={MOST_TOKENS}"]
        return [*words, f"mini_batch={len(rows)}", "micro_batch=5"]
    words += ["data.max_prompt=8", f"generation.max_new_tokens={LIMIT}", "samples_per_prompt=6"]
    return [*words, "mini_batch=48", "micro_batch=7", REWARD]


def compared(
    setting: Setting, cases: Sequence[Case], folder: Path, by_trl: Callable[..., dict[str, Any]]
) -> list[dict]:
    """Compares all cases: returns a row for each case and kind of casts. TRL takes all rows of a step at once.

    by_trl: makes a step; trl_worker.py says of what.
    """
    rows, out = [], folder / "step.safetensors"
    for case, wide in product(cases, (True, False)):
        mine = ours.one_step(case, words_of(setting, case, folder), seed=SEED, wide=wide)
        told = by_trl(
            kind=case.page,
            rows=case.rows(text_of) if case.rows else mine.rows,
            out=str(out),
            wide=wide,
            model=str(setting.models[case.role]),
            reference=str(setting.models["reference"]),
            options=case.theirs if case.rows else {"beta": KL, "max_completion_length": LIMIT, **case.theirs},
        )
        rows.append(compared_step(setting, case, mine, told, load_file(out), "float64" if wide else WITH_CASTS))
    return rows


def compared_step(
    setting: Setting, case: Case, mine: ours.Taken, told: Mapping, theirs: Mapping[str, Tensor], precision: str
) -> dict:
    """Returns the row of a step that both programs have taken."""
    row = {"model": setting.name, "case": case.name, "precision": precision}
    row |= errors(mine, told["loss"], theirs) | {"difference": case.difference}
    row |= about_given(case, mine, told, METRICS[precision]) if case.rows else about_generated(mine)
    row["tolerance"] = TOLERANCE if precision == "float64" else case.casts_tolerance
    row["ok"] = max(row[name] for name in ERRORS) <= row["tolerance"]
    same_reading = case.rows and row["same_tokens"] and row["metrics_error"] <= row["metrics_tolerance"]
    row["ok"] &= same_reading if case.rows else both_clips(row)
    return row


# ---- generated responses --------------------------------------------------------------------------------------------


def about_generated(mine: ours.Taken) -> dict:
    """Returns lengths of the responses, and shares of the tokens that each clip changes."""
    lengths = [len(row["response"]) for row in mine.rows]
    shares = {name: mine.metrics[name] for name in ("clip_fraction_low", "clip_fraction_high")}
    return {"responses": len(lengths), "shortest": min(lengths), "longest": max(lengths), **shares}


def both_clips(row: Mapping) -> bool:
    """Returns whether each of the clips changes some tokens and not all; CISPO has only the upper one, SAPO none."""
    low, high = "clip_fraction_low", "clip_fraction_high"
    names = {"CISPO": [high], "SAPO": []}.get(row["case"], [low, high])
    return all(0 < row[name] < 1 for name in names)


# ---- given responses ------------------------------------------------------------------------------------------------


def about_given(case: Case, mine: ours.Taken, told: Mapping, tolerance: float) -> dict:
    """Returns how many rows and learned tokens the step has, the lengths of its sequences, and how both programs read
    them.

    told: by TRL.
    """
    sequences = [sequence for row in mine.rows for sequence in row]
    lengths = [len(tokens) for tokens, _ in sequences]
    learned = sum(sum(marks) for _, marks in sequences)
    found = metric_errors(case, mine.metrics, told["metrics"])
    row = {"rows": len(mine.rows), "shortest": min(lengths), "longest": max(lengths), "learned": learned}
    row |= {"metrics": sorted(found), "metrics_error": max(found.values()), "metrics_tolerance": tolerance}
    return row | {"same_tokens": same_tokens(case, mine.rows, told["rows"])}


def metric_errors(case: Case, mine: Mapping, theirs: Mapping) -> dict[str, float]:
    """Returns relative differences of what both programs log, by TRL's names; ours are found by their aliases."""
    names = {row["name"][6:]: row["ours"][0] for row in TABLE["trl"] if case.page in row.get("algorithms", ())}
    shared = {name: here for name, here in (names | EXTREMES).items() if name in theirs}
    return {name: abs(mine[here] - theirs[name]) / max(abs(theirs[name]), 1e-300) for name, here in shared.items()}


def same_tokens(case: Case, mine: Sequence[Row], theirs: Sequence[Row]) -> bool:
    """Returns whether both programs have the same rows, in any order: tokens, and which of them are learned. A reward
    model learns from scores, so only its tokens count."""
    marked = case.page != "reward_model"

    def in_order(rows: Sequence) -> list:
        return sorted([(list(tokens), list(marks) if marked else []) for tokens, marks in row] for row in rows)

    return in_order(mine) == in_order(theirs)


# ---- errors ---------------------------------------------------------------------------------------------------------


def errors(mine: ours.Taken, loss: float, theirs: Mapping[str, Tensor]) -> dict:
    """Returns relative differences: of the loss; of the gradient of the worst weight, and of the worst weight after the
    step, each as the norm of the difference over the norm of TRL's tensor."""
    pairs = {"gradient": mine.gradients, "after": mine.after}
    found = {what: _tensor_errors(what, tensors, theirs) for what, tensors in pairs.items()}
    return {
        "loss": mine.loss,
        "trl_loss": loss,
        "loss_error": abs(mine.loss - loss) / abs(loss),
        "gradient_error": max(found["gradient"].values()),
        "weights_error": max(found["after"].values()),
        "worst": max(found["gradient"], key=found["gradient"].__getitem__),
        "tensors": len(found["gradient"]),
    }


def _tensor_errors(what: str, mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, float]:
    chosen = {key.removeprefix(f"{what} "): x for key, x in theirs.items() if key.startswith(what)}
    named = {key.removeprefix("model."): x for key, x in chosen.items()}
    assert set(named) == set(mine), set(named) ^ set(mine)
    return {
        name: ((mine[name].double() - x.double()).norm() / x.double().norm().clamp(min=1e-300)).item()
        for name, x in named.items()
    }
