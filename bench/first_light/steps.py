"""What `python -m bench first-light` does, step by step: correctness first, then speed, each in a process of its own.

A step is a function of a Light that returns what it found; rows it has measured are kept even if it fails later.
"""

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FACTS = "facts.json"  # of the work folder: what the step `device` found
GROUPS = ("correctness", "speed")


@dataclass(frozen=True, slots=True)
class Step:
    """promise: what must hold to pass. function: module:name. limit_s: seconds it may take. needs: what it is skipped
    without (a package, or a tool of the facts). group: those of `speed` have the machine to themselves."""

    name: str
    promise: str
    function: str
    limit_s: float
    needs: tuple[str, ...] = ()
    group: str = "correctness"


@dataclass(frozen=True, slots=True)
class Found:
    """What a step says at its end. told: a few words for the table."""

    ok: bool
    told: str


class Missing(Exception):
    """The step can't be taken here; says what it would need."""


@dataclass(frozen=True)
class Light:
    """What a step is given. out: for files that are kept. work: for all others. dry: everything small, on the CPU."""

    name: str
    out: Path
    work: Path
    dry: bool = False
    _rows: list[dict] = field(default_factory=list)

    @cached_property
    def device(self) -> "torch.device":
        import torch

        return torch.device("cpu") if self.dry else torch.device("cuda", torch.cuda.current_device())

    def row(self, **measured: Any) -> dict:
        """Keeps a row at once, so that it is there whatever happens next."""
        self._rows.append(measured)
        with open(self.work / f"{self.name}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(measured) + "\n")
        return measured


CHECKS, SPEED = "bench.first_light.checks", "bench.first_light.speed"
SEVERAL = "bench.first_light.several"
GPU, TWO_GPUS, MPI = "a GPU", "two GPUs", "mpi4py with an MPI library"
RUNTIME = ("torch", "triton", "psutil")
PROGRAM = (*RUNTIME, "pydantic", "safetensors", "tokenizers", "tqdm", MPI)
STEPS = (
    Step(
        "device",
        "torch sees as many GPUs as nvidia-smi, and something hints at them",
        "bench.first_light.facts:device",
        60,
    ),
    Step("kernels", "tests/gpu pass", f"{CHECKS}:gpu_tests", 180, (GPU, "pytest", *RUNTIME)),
    Step(
        "kernel-cases",
        "the kernels' unit tests pass on the device",
        f"{CHECKS}:kernel_tests",
        200,
        (GPU, "pytest", *RUNTIME),
    ),
    Step(
        "engine",
        "tokens of the embedded model with graphs, without and on the CPU are equal",
        f"{CHECKS}:engine",
        90,
        (GPU, *RUNTIME, "safetensors"),
    ),
    Step(
        "train",
        "three iterations and one more after a resume draw the CPU's tokens; bfloat16 parity of 0.1 nats",
        f"{CHECKS}:train",
        150,
        (GPU, *PROGRAM),
    ),
    Step(
        "memory",
        "an engine that has ended holds no memory of the device, with the garbage collector off",
        f"{CHECKS}:memory",
        60,
        (GPU, *RUNTIME, "safetensors"),
    ),
    Step(
        "preemption",
        "256 rows in a cache for a third of them draw the tokens of a full cache",
        f"{CHECKS}:preemption",
        60,
        (GPU, *RUNTIME, "safetensors"),
    ),
    Step(
        "shared",
        "four ranks that share the device draw the tokens of one rank on the CPU under each strategy",
        f"{CHECKS}:shared",
        200,
        (GPU, *PROGRAM, "mpiexec"),
    ),
    Step(
        "nccl-strategies",
        "two to four ranks with a GPU each draw the tokens of one rank on the CPU under each strategy",
        f"{SEVERAL}:nccl_strategies",
        200,
        (TWO_GPUS, *PROGRAM, "mpiexec"),
    ),
    Step(
        "tp-graphs",
        "two slices draw the tokens of one rank, with all-reduces in CUDA graphs and without",
        f"{SEVERAL}:tp_graphs",
        220,
        (TWO_GPUS, *PROGRAM, "mpiexec"),
    ),
    Step(
        "sanitizer",
        "compute-sanitizer memcheck finds nothing in a decode step, launched and captured",
        f"{CHECKS}:sanitizer",
        150,
        (GPU, "compute-sanitizer", *RUNTIME),
    ),
    Step(
        "decode",
        "a decode step of 7B shape, 64 rows of 1,024 tokens: 70% of memory bandwidth",
        f"{SPEED}:decode",
        120,
        (GPU, "transformers", *RUNTIME),
        "speed",
    ),
    Step(
        "sample",
        "sample at [256, 131072]: 60% of memory bandwidth, float32 and bfloat16",
        f"{SPEED}:sampling",
        60,
        (GPU, *RUNTIME),
        "speed",
    ),
    Step(
        "generate",
        "4 times as fast as transformers, 7B shape, 256 responses of realistic lengths",
        f"{SPEED}:generate",
        150,
        (GPU, "transformers", *RUNTIME),
        "speed",
    ),
    Step(
        "nano-vllm",
        "256 sequences of Qwen3-0.6B's shape, in and out 100 to 1,024 tokens: every response has its length",
        f"{SPEED}:nano_vllm",
        90,
        (GPU, *RUNTIME),
        "speed",
    ),
    Step(
        "decode-profile",
        "thirty rounds at 64 and 256 rows of 7B shape: one synchronisation a round, 90% of the time computing",
        "bench.first_light.profile:decode_profile",
        90,
        (GPU, *RUNTIME),
        "speed",
    ),
    Step(
        "train-step",
        "an optimizer step of 1.1 B parameters in bfloat16: 40% of the rate of products, the forecast's memory +-10%",
        f"{SPEED}:train_step",
        90,
        (GPU, "pydantic", *RUNTIME),
        "speed",
    ),
    Step(
        "steady",
        "twenty iterations: no kernel is loaded and no memory reserved after the second one",
        "bench.first_light.steady:steady",
        120,
        (GPU, *RUNTIME),
        "speed",
    ),
    Step(
        "pending-receive",
        "launches, captures and freed memory do not wait for a message; products beside receives 10% slower at most",
        f"{SEVERAL}:pending_receive",
        110,
        (TWO_GPUS, *PROGRAM, "mpiexec"),
        "speed",
    ),
    Step(
        "profile",
        "a calibration of this device, measured and read back",
        f"{SPEED}:calibrate",
        150,
        (GPU, *PROGRAM),
        "speed",
    ),
    Step(
        "kernel-step",
        "the kernels of that decode step alone: 70% of memory bandwidth",
        f"{SPEED}:kernel_step",
        60,
        (GPU, *RUNTIME),
        "speed",
    ),
    Step(
        "kernel-speed",
        "every case of `bench kernels` keeps what it promises",
        f"{SPEED}:kernel_speed",
        200,
        (GPU, "transformers", *RUNTIME),
        "speed",
    ),
    Step(
        "generate-static",
        "4 times as fast as transformers with a static cache, which it compiles for",
        f"{SPEED}:generate_static",
        300,
        (GPU, "transformers", *RUNTIME),
        "speed",
    ),
)


def chosen(steps: Iterable[Step], names: str) -> list[Step]:
    """The steps of a list of names and groups with commas between them, in their order; the first step is always
    taken, since it says what the others may use. Raises ValueError for a name that is none."""
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
    """Takes a step in this process and leaves its result in the work folder; returns the exit status."""
    module, _, name = step.function.partition(":")
    try:
        found = getattr(import_module(module), name)(light)
        result = {"verdict": "passed" if found.ok else "failed", "told": found.told}
    except Missing as missing:
        result = {"verdict": f"skipped: {missing}", "told": ""}
    (light.work / f"{step.name}.json").write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    return 0


def environment(dry: bool) -> dict[str, str]:
    """Of every step: the sources can be imported from any folder, an MPI library is found beside the packages, nothing
    looks for a network, and a dry run sees no GPU."""
    found = dict(os.environ)
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
