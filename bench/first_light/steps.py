"""What `python -m bench first-light` does, step by step (steps.toml).

A step is a function of a Light that returns what it found; rows it has measured are kept even if it fails later.
"""

import json
import os
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.world.devices import set_defaults, sleep_while_waiting

if TYPE_CHECKING:
    import torch

FACTS = "facts.json"  # of the work folder: what the step `device` found
GROUPS = ("correctness", "speed")


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the walk.

    promise: what must hold to pass.
    function: module:name.
    limit_s: seconds it may take.
    gpus, needs: what it is skipped without: so many GPUs, with all that their use needs, and a package or a tool of the
        facts, or `program`, which is all that a run needs.
    group: those of `speed` have the machine to themselves.
    sleeps: while it waits for a device, as runs do.
    """

    name: str
    promise: str
    function: str
    limit_s: float
    gpus: int = 0
    needs: Sequence[str] = ()
    group: str = "correctness"
    sleeps: bool = True

    @property
    def required(self) -> list[str]:
        """What the step is skipped without."""
        others = (PROGRAM if name == "program" else (name,) for name in self.needs)
        return [*((GPU if self.gpus == 1 else TWO_GPUS, *RUNTIME) if self.gpus else ()), *chain.from_iterable(others)]


@dataclass(frozen=True, slots=True)
class Found:
    """What a step says at its end. told: a few words for the table."""

    ok: bool
    told: str


class Missing(Exception):
    """The step can't be taken here; says what it would need."""


@dataclass(frozen=True)
class Light:
    """What a step is given.

    out: for files that are kept.
    work: for all others.
    dry: everything small, on the CPU.
    """

    name: str
    out: Path
    work: Path
    dry: bool = False

    @cached_property
    def device(self) -> "torch.device":
        import torch

        return torch.device("cpu") if self.dry else torch.device("cuda", torch.cuda.current_device())

    @property
    def facts(self) -> dict[str, Any]:
        """What the step `device` found."""
        return json.loads((self.work / FACTS).read_text(encoding="utf-8"))

    def row(self, **measured: Any) -> dict:
        """Keeps a row at once, so that it is there whatever happens next."""
        with open(self.work / f"{self.name}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(measured) + "\n")
        return measured


GPU, TWO_GPUS, MPI = "a GPU", "two GPUs", "mpi4py with an MPI library"
RUNTIME = ("torch", "triton", "psutil")
PROGRAM = ("pydantic", "safetensors", "tokenizers", "tqdm", MPI)


STEPS = tuple(
    Step(name, **one) for name, one in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items()
)


def chosen(steps: Iterable[Step], names: str) -> list[Step]:
    """Returns the steps of a list of names and groups with commas between them, in their order; the first step is
    always taken, since it says what the others may use. Raises UserError for an unknown name."""
    first, *others = steps
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = [first.name, *(step.name for step in others)]
    if unknown := [name for name in wanted if name not in (*known, *GROUPS)]:
        raise UserError(f"there is no step {unknown[0]!r}; there are {', '.join(known)}")
    return [first, *(step for step in others if not wanted or {step.name, step.group} & set(wanted))]


def command(step: Step, out: Path, work: Path, *, dry: bool) -> list[str]:
    """Returns the command of a process that takes one step."""
    words = [json.dumps(asdict(step)), str(out), str(work), *(["dry"] if dry else [])]
    return [sys.executable, "-c", f"from {__name__} import main; main()", *words]


def main() -> None:
    """Takes a step in this process, and leaves its result in the work folder."""
    step, (out, work) = Step(**json.loads(sys.argv[1])), map(Path, sys.argv[2:4])
    light = Light(step.name, out, work, dry=len(sys.argv) > 4)
    module, _, name = step.function.partition(":")
    try:
        if step.sleeps and not light.dry:
            sleep_while_waiting(0)
        found = getattr(import_module(module), name)(light)
        result = {"verdict": "passed" if found.ok else "failed", "told": found.told}
    except Missing as missing:
        result = {"verdict": f"skipped: {missing}", "told": ""}
    (work / f"{step.name}.json").write_text(json.dumps(result), encoding="utf-8")


def environment(dry: bool) -> dict[str, str]:
    """Returns the environment of every step: the sources can be imported from any folder, an MPI library is found
    beside the packages, nothing looks for a network, torch, CUDA and NCCL have the defaults of runs, and a dry run sees
    no GPU."""
    found = dict(os.environ)
    set_defaults(found)
    root = str(Path(__file__).resolve().parents[2])
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (root, found.get("PYTHONPATH"))))
    found |= {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    places = [Path(sys.prefix), *(Path(entry) for entry in sys.path if entry)]
    places += [place.parents[2] for place in places if place.name == "site-packages"]  # a prefix that was named as one
    for variable, folder, pattern in (("PATH", "bin", "mpiexec"), ("LD_LIBRARY_PATH", "lib", "libmpi.so*")):
        beside = [str(place / folder) for place in places if list((place / folder).glob(pattern))]
        parts = [*dict.fromkeys(beside), *filter(None, found.get(variable, "").split(os.pathsep))]
        if parts:
            found[variable] = os.pathsep.join(parts)
    if dry:
        found |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return found
