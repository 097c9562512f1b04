"""Training runs of this program, as users start them, for the scripts that make models; and rows for these runs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def write_rows(path: Path, rows: Iterable[Mapping]) -> Path:
    """Writes one object per line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(words: list[str]) -> None:
    """Runs a command in the repository, with the programs of this Python's environment. Raises CalledProcessError."""
    found = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    subprocess.run(words, check=True, cwd=REPOSITORY, env=os.environ | {"PATH": found})


def trained(algorithm: str, model: Path, data: Path, run_folder: Path, *words: str, ranks: int) -> Path:
    """Trains a model by a run of this program -> the folder of the trained model."""
    command = ["mpirun", "-n", str(ranks), "python", "-m", "rlhf_spmd", "train", "--algorithm", algorithm]
    command += ["--model", str(model), "--runs", str(run_folder.parent), "--name", run_folder.name]
    command += [f"data.prompts={data}", "num_samples=0", "checkpoint.every=0", "deadline_s=300", *words]
    run(command)
    (weights,) = run_folder.glob("*/model.safetensors")
    return weights.parent


def adamw(role: str, lr: float, warmup: int) -> list[str]:
    """Returns the arguments for the optimizer of models that start from nothing."""
    words = [f"optimizer.{role}_lr={lr}", f"optimizer.warmup_steps={warmup}", "optimizer.schedule=cosine"]
    return [*words, "optimizer.beta2=0.98", "optimizer.eps=1e-8", "optimizer.weight_decay=0.01"]


def sizes(steps: int, batch: int, ranks: int) -> list[str]:
    """Returns the arguments for ten steps an iteration, as far as there are so many, of a run that reads `steps` times
    `batch` rows."""
    per_iteration = next(number for number in range(min(10, steps), 0, -1) if steps % number == 0)
    words = [f"iterations={steps // per_iteration}", f"rollout_batch={batch * per_iteration}", f"mini_batch={batch}"]
    return [*words, f"micro_batch={max(1, batch // ranks)}"]


def metrics(run_folder: Path) -> list[dict]:
    return read_rows(run_folder / "metrics.jsonl")


def tail(run_folder: Path, name: str) -> float:
    """Returns the mean of a metric over the last twentieth of the iterations."""
    values = [row[name] for row in metrics(run_folder)]
    last = values[-max(1, len(values) // 20) :]
    return sum(last) / len(last)
