"""The goldens of `tools unchanged` that are runs: small ones of the embedded model, started as users start them.

Of each run what does not tell the time: the metrics and the hash of all responses of each iteration, a SHA-256 of every
tensor of its last checkpoint (weights and moments of actor and critic) and of the actor that it saves, the state that a
resume reads, and the samples. Floats are written as Python's repr, which two floats share only if their bits do.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.rows import REPOSITORY, TIMED, read_rows

LIMIT_S = 300.0
SMALL = ["iterations=2", "rollout_batch=32", "mini_batch=16", "micro_batch=4", "generation.max_new_tokens=12"]
SMALL += ["num_samples=2", "ppo.kl_controller=adaptive"]
PLACES = (  # ranks, strategy, its options
    (1, "flattening", ()),
    (3, "interleaving1", ()),
    (4, "interleaving2", ()),
    (4, "separation", ()),
    (4, "reallocation", ("training_tp=2", "training_pp=2")),
    (2, "flattening", ("zero=3",)),
)
DTYPES = ("float32", "bfloat16")
RESUMED = (2, "separation", ())  # stopped after the first of its two iterations
OF_A_PLACE = ("strategy", "num_ranks", "inputs", "surroundings")  # of the state of a checkpoint: paths, machine, names


@dataclass(frozen=True, slots=True)
class Case:
    """A run.

    stopped: it does one iteration, and is resumed for the other one.
    """

    ranks: int
    strategy: str
    options: tuple[str, ...]
    dtype: str
    stopped: bool = False

    def __str__(self) -> str:
        words = [self.strategy, *self.options, "on", str(self.ranks), self.dtype]
        return " ".join(["run", *words, *(["resumed"] if self.stopped else [])])

    def commands(self, runs: Path, name: str) -> Iterator[list[str]]:
        """Yields what to start, one after the other."""
        words = [*SMALL, f"dtype={self.dtype}", *(f"strategy.{option}" for option in self.options)]
        first = ["--preset", "tiny", "--strategy", self.strategy, "--runs", str(runs), "--name", name, *words]
        yield [*first, "iterations=1"] if self.stopped else first
        if self.stopped:
            yield ["--resume", str(runs / name), "iterations=2"]


CASES = tuple(Case(*place, dtype) for dtype in DTYPES for place in PLACES) + (Case(*RESUMED, "float32", stopped=True),)

STATE_NAMES = {"score_moments": "scores"}


def goldens(folder: Path) -> dict[str, dict[str, str]]:
    """Returns what every run left, by the name of its case. folder: for the runs."""
    found = {}
    for number, case in enumerate(CASES):
        for options in case.commands(folder, f"run-{number}"):
            train(case.ranks, options)
        found[str(case)] = left_by(folder / f"run-{number}")
        print(f"  {case}", file=sys.stderr, flush=True)
    return found


def train(num_ranks: int, options: list[str]) -> None:
    """Returns the files of a run folder that are compared, as names and texts."""
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    command = [mpirun, "-n", str(num_ranks), sys.executable, "-m", "rlhf_spmd", "train", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    told = {"capture_output": True, "text": True, "timeout": LIMIT_S, "check": False}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, **told)
    if done.returncode:
        raise RuntimeError(f"{' '.join(options)} ended with {done.returncode}:\n{done.stderr}")


def left_by(run: Path) -> dict[str, str]:
    """Returns what is compared of a run folder, as names and texts."""
    found: dict[str, str] = {}
    for row in read_rows(run / "metrics.jsonl"):
        number = row.pop("iteration")
        found |= {f"iteration {number} {name}": repr(value) for name, value in row.items() if name not in TIMED}
    last = max((run / "checkpoints").glob("iteration-*"))
    state = json.loads((last / "state.json").read_text(encoding="utf-8"))
    state = {name: value for name, value in state.items() if name not in OF_A_PLACE}
    # since the algorithm's state stands under a name of its own, score_moments are what was called scores
    state |= {STATE_NAMES.get(name, name): value for name, value in state.pop("state", {}).items()}
    found |= leaves("state", state)
    for path in sorted(last.glob("rank-*.safetensors")):
        found |= {f"{path.stem} {name}": text for name, text in tensors(path).items()}
    found |= {f"saved actor {name}": text for name, text in tensors(run / "actor" / "model.safetensors").items()}
    for number, row in enumerate(read_rows(run / "samples.jsonl")):
        found |= {f"sample {number} {name}": repr(value) for name, value in row.items()}
    return found


def leaves(name: str, value: object) -> dict[str, str]:
    """Returns a value of JSON as names and texts: one for each number or text in its objects."""
    if not isinstance(value, dict):
        return {name: repr(value)}
    return {key: text for part, inner in value.items() for key, text in leaves(f"{name} {part}", inner).items()}


def tensors(path: Path) -> dict[str, str]:
    """Returns type, shape and SHA-256 of the bits of every tensor of a file, and what else the file says."""
    import torch
    from safetensors import safe_open

    found = {}
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            tensor = file.get_tensor(name).contiguous()
            bits = hashlib.sha256(tensor.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
            found[name] = f"{tensor.dtype} {list(tensor.shape)} {bits}"
        for name, text in (file.metadata() or {}).items():
            found[f"about {name}"] = hashlib.sha256(text.encode()).hexdigest()
    return found
