"""What `python -m bench first-light` does, step by step (steps.toml).

A step is a function of a Light that returns what it found; rows it has measured are kept even if it fails later.
"""

import json
import os
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    needs: what it is skipped without (a package, or a tool of the facts).
    group: those of `speed` have the machine to themselves.
    sleeps: while it waits for a device, as runs do.
    """

    name: str
    promise: str
    function: str
    limit_s: float
    needs: tuple[str, ...] = ()
    group: str = "correctness"
    sleeps: bool = True


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
    _rows: list[dict] = field(default_factory=list)

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
        self._rows.append(measured)
        with open(self.work / f"{self.name}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(measured) + "\n")
        return measured


GPU, TWO_GPUS, MPI = "a GPU", "two GPUs", "mpi4py with an MPI library"
RUNTIME = ("torch", "triton", "psutil")
PROGRAM = ("pydantic", "safetensors", "tokenizers", "tqdm", MPI)


def _read(path: Path) -> tuple[Step, ...]:
    """Returns the steps of a file."""
    return tuple(
        Step(
            name,
            one["promise"],
            f"bench.first_light.{one['function']}",
            one["limit_s"],
            _needs(one["gpus"], one.get("needs", ())) if "gpus" in one else (),
            one.get("group", GROUPS[0]),
            one.get("sleeps", True),
        )
        for name, one in tomllib.loads(path.read_text(encoding="utf-8")).items()
    )


def _needs(gpus: int, names: Iterable[str]) -> tuple[str, ...]:
    others = (PROGRAM if name == "program" else (name,) for name in names)
    return (GPU if gpus == 1 else TWO_GPUS, *RUNTIME, *chain.from_iterable(others))


STEPS = _read(Path(__file__).with_suffix(".toml"))


def chosen(steps: Iterable[Step], names: str) -> list[Step]:
    """Returns the steps of a list of names and groups with commas between them, in their order; the first step is
    always taken, since it says what the others may use. Raises ValueError for an unknown name."""
    steps = list(steps)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = {step.name for step in steps} | set(GROUPS)
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"there is no step {unknown[0]!r}; there are {', '.join(step.name for step in steps)}")
    return [
        step
        for index, step in enumerate(steps)
        if index == 0 or not wanted or step.name in wanted or step.group in wanted
    ]


def run_one(step: Step, light: Light) -> int:
    """Takes a step in this process, and leaves its result in the work folder;
    returns the exit status."""
    module, _, name = step.function.partition(":")
    try:
        if step.sleeps and not light.dry:
            sleep_while_waiting(0)
        found = getattr(import_module(module), name)(light)
        result = {"verdict": "passed" if found.ok else "failed", "told": found.told}
    except Missing as missing:
        result = {"verdict": f"skipped: {missing}", "told": ""}
    (light.work / f"{step.name}.json").write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    return 0


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
