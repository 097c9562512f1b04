"""The same step by both programs: how far apart are loss, gradients, and weights after it?"""

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.against_trl import ours
from bench.against_trl.cases import KL, Case
from bench.rows import REPOSITORY
from rlhf_spmd import embedded
from tests.folders import WORDS, write_model

PEER = REPOSITORY / ".venv-peers" / "bin" / "python"
THREADS = 2
EOS = (1, 7, 20)  # of the small models: so many that responses end at all lengths
SMALL = {  # random Llamas
    "two layers": {"max_position_embeddings": 128, "eos_token_ids": EOS},
    "three layers, tied": {
        "num_layers": 3,
        "num_heads": 6,
        "head_dim": 6,
        "hidden_size": 36,
        "tie_embeddings": True,
        "max_position_embeddings": 128,
        "eos_token_ids": EOS,
    },
}
TOLERANCE = {"float64": 1e-7, "float32": 1e-3}  # of the largest relative difference
WITH_CASTS = "float64 with casts"  # Case.with_casts
ERRORS = ("loss_error", "gradient_error", "weights_error")
SEED = 3
NEAR = 0.1  # the reference's distance from the actor, of the weights' standard deviation
LIMIT_S = 900.0  # of TRL's process


@dataclass(frozen=True, slots=True)
class Setting:
    """Models and data that both programs read. limit: most tokens of a response; micro_batch: of ours only; TRL takes
    all rows at once."""

    name: str
    actor: Path
    reference: Path
    words: tuple[str, ...]
    dtype: str
    limit: int
    casts: tuple[bool, ...]  # of TRL: as it is (False), widened (True)

    def precision(self, wide: bool) -> str:
        return self.dtype if wide or self.dtype != "float64" else WITH_CASTS


def small(folder: Path) -> list[Setting]:
    """Random Llamas in float64 with prompts of 1 to 6 words, and responses that end anywhere."""
    (folder / "prompts.jsonl").write_text(
        "".join(
            json.dumps({"prompt": " ".join(WORDS[(7 * i + 3 * j) % len(WORDS)] for j in range(1 + i % 6))}) + "\n"
            for i in range(8)
        ),
        encoding="utf-8",
    )
    sizes = ["data.max_prompt=8", "generation.max_new_tokens=24", "rollout_batch=8", "samples_per_prompt=6"]
    sizes += ["mini_batch=48", "micro_batch=7", f"data.prompts={folder / 'prompts.jsonl'}"]
    words = (*sizes, ours.write_reward(folder / "reward.py"))
    settings = []
    for number, (name, shape) in enumerate(SMALL.items()):
        actor = write_model(folder / f"actor-{number}", seed=1 + number, **shape)
        reference = perturbed_copy(actor, folder / f"reference-{number}")
        settings.append(Setting(name, actor, reference, words, "float64", 24, (True, False)))
    return settings


def smollm2(folder: Path, scratch: Path) -> Setting:
    """SmolLM2-135M in float32, made to end its responses at full stops and commas."""
    actor, config = scratch / "actor", json.loads((folder / "config.json").read_text(encoding="utf-8"))
    actor.mkdir()
    for path in folder.iterdir():
        (actor / path.name).symlink_to(path)
    tokens = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    config["eos_token_id"] = [config["eos_token_id"], tokens["."], tokens[","]]
    (actor / "generation_config.json").unlink()
    (actor / "config.json").unlink()
    (actor / "config.json").write_text(json.dumps(config), encoding="utf-8")
    sizes = ["data.max_prompt=32", "generation.max_new_tokens=24", "rollout_batch=4", "samples_per_prompt=4"]
    sizes += ["mini_batch=16", "micro_batch=8", f"data.prompts={embedded.path_of('sentiment_prompts.txt')}"]
    words = (*sizes, ours.write_reward(scratch / "reward.py"))
    reference = perturbed_copy(actor, scratch / "reference")
    return Setting("SmolLM2-135M", actor, reference, words, "float32", 24, (False,))


def perturbed_copy(folder: Path, copy: Path) -> Path:
    """A model near another one, so that the KL divergence between them is not 0."""
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    tensors, random = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(SEED)
    for name, tensor in tensors.items():
        spread = tensor.float().std() if tensor.dim() > 1 else tensor.float().abs().mean()
        tensors[name] = tensor + NEAR * spread * torch.randn(tensor.shape, generator=random)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


def compared(setting: Setting, cases: Sequence[Case], folder: Path, *, seed: int = SEED) -> list[dict]:
    """A row for each case and kind of casts."""
    words = [*setting.words, f"models.actor={setting.actor}", f"models.reference={setting.reference}"]
    steps: dict[tuple[str, bool], dict] = {}
    mine: dict[tuple[str, bool], ours.Taken] = {}
    for number, case in enumerate(cases):
        for wide in setting.casts:
            taken = ours.one_step(case, words, dtype=setting.dtype, seed=seed, wide=wide)
            mine[case.name, wide] = taken
            rows = folder / f"rows-{number}-{wide}.json"
            rows.write_text(json.dumps(taken.rows), encoding="utf-8")
            out = folder / f"step-{number}-{wide}.safetensors"
            steps[case.name, wide] = step_of(setting, case, rows, out, wide=wide)
    in_peer("bench.against_trl.trl_losses", {"threads": THREADS, "steps": list(steps.values())}, folder)
    rows = []
    for case in cases:
        for wide in setting.casts:
            with safe_open(steps[case.name, wide]["out"], "pt") as file:
                theirs = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
                loss = float(file.metadata()["loss"])
            row = {"model": setting.name, "case": case.name, "precision": setting.precision(wide)}
            taken = mine[case.name, wide]
            row |= about(taken) | errors(taken, loss, theirs)
            row |= {"tolerance": TOLERANCE.get(row["precision"], case.with_casts), "difference": case.difference}
            worst = max(row[name] for name in ERRORS)
            row["ok"] = worst <= row["tolerance"] and both_clips(row)
            print(show(row), flush=True)
            rows.append(row)
    return rows


def step_of(setting: Setting, case: Case, rows: Path, out: Path, *, wide: bool) -> dict:
    """What TRL's process is told of one step."""
    return {
        "kind": case.page,
        "rows": str(rows),
        "model": str(setting.actor),
        "reference": str(setting.reference),
        "dtype": setting.dtype,
        "limit": setting.limit,
        "wide": wide,
        "options": {"beta": KL, **case.theirs},
        "out": str(out),
    }


def in_peer(module: str, job: dict, folder: Path) -> None:
    """Runs a module in TRL's environment with a job as its argument. Raises if it fails."""
    path = folder / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    command = [str(PEER), "-m", module, str(path)]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, encoding="utf-8", errors="replace", check=False, timeout=LIMIT_S
    )
    if done.returncode:
        raise RuntimeError(f"{module} ended with {done.returncode}:\n{done.stderr}")


def about(mine: ours.Taken) -> dict:
    """What kind of step it was: lengths of its responses, shares of the tokens that each clip changes."""
    lengths = [len(row["response"]) for row in mine.rows]
    shares = {name: mine.metrics[name] for name in ("clip_fraction_low", "clip_fraction_high")}
    return {"responses": len(lengths), "shortest": min(lengths), "longest": max(lengths), **shares}


def both_clips(row: Mapping) -> bool:
    """Whether each of the clips changes some tokens and not all; CISPO has only the upper one."""
    names = ["clip_fraction_high"] if row["case"] == "CISPO" else ["clip_fraction_low", "clip_fraction_high"]
    return all(0 < row[name] < 1 for name in names)


def errors(mine: ours.Taken, loss: float, theirs: Mapping[str, Tensor]) -> dict:
    """Relative differences: of the loss; of the gradient of the worst weight, and of the worst weight after the step,
    each as the norm of the difference over the norm of TRL's tensor."""
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


def show(row: Mapping) -> str:
    numbers = ", ".join(f"{name.removesuffix('_error')} {row[name]:.1e}" for name in ERRORS)
    verdict = "" if row["ok"] else f"  NOT within {row['tolerance']:g}, or a clip does nothing"
    clips = f"clipped {row['clip_fraction_low']:.0%} and {row['clip_fraction_high']:.0%}"
    return f"{row['model']}, {row['case']}, {row['precision']}: {numbers} ({row['worst']}); {clips}{verdict}"
