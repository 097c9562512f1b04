"""docs/one_iteration.md: which functions lead from `main` to the model, to a loss, to a token and to a message, as a
run of the demo on four ranks has executed them.

Every rank notes its stack when it first enters one of these functions. Command: python -m tools walk (10 s; it writes
the page); a test compares.
"""

import ast
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from types import FrameType

from bench.rows import REPOSITORY, on_ranks

PAGE = REPOSITORY / "docs" / "one_iteration.md"
OWN = tuple(f"{REPOSITORY / folder}{os.sep}" for folder in ("rlhf_spmd", "kernels", "strategies"))
RANKS, ON_A_RANK = 4, "--on-a-rank"
SMALL = ("rollout_batch=16", "mini_batch=8", "generation.max_new_tokens=8", "num_samples=0")  # the ways are the same
FORK, IN_LOOP = "InstructionLoop.iteration", "Loop.iterations"  # where most ways part; a frame of all of them
# heading -> a function, and one through which the way there leads
WAYS = {
    "A token is sampled": ("sample", "generate"),
    "The model reads a micro-batch that is trained on": ("Transformer.forward", "optimizer_step.py"),
    "The loss of a micro-batch": ("policy_loss", ""),
    "Gradients are summed over ranks": ("Sender.send", ""),
    "The optimizer changes the weights": ("AdamW.step", ""),
    "Logprobs, values and scores are inferred": ("read_output", "infer.py"),
    "Advantages are computed": ("estimate_advantages", ""),
    "Rows are sent to another rank": ("Transfers.post", ""),
    "A rank waits for rows": ("Transfers.wait", ""),
    "New weights come to the ranks that generate": ("Mover.finish", ""),
    "The state of the algorithm moves on": ("after_iteration", ""),
}
# What a reader needs for PPO by separation: the texts of an iteration, and every file of these rooms on the way from
# `main` to the model and to a loss. Kernels, and the inside of a model, are below.
ROOMS = tuple(
    f"rlhf_spmd/{one}/" for one in ("algorithms", "plan", "runtime/engines", "runtime/execute", "runtime/run")
)
TO_THE_MODEL = ("The model reads a micro-batch that is trained on", "The loss of a micro-batch")
TO_READ = (
    "rlhf_spmd/algorithms/ppo.py",
    "strategies/separation.py",
    "rlhf_spmd/plan/program/instructions.py",
    "rlhf_spmd/runtime/run/train.py",
    "rlhf_spmd/runtime/run/loop.py",
    "rlhf_spmd/runtime/execute/instruction_loop.py",
    "rlhf_spmd/runtime/execute/executor.py",
    "rlhf_spmd/runtime/execute/optimizer_step.py",
    "rlhf_spmd/runtime/execute/page_functions.py",
    "rlhf_spmd/runtime/engines/flat_engine.py",
    "rlhf_spmd/algorithms/advantages.py",
    "rlhf_spmd/algorithms/surrogates.py",
)
MOST_FILES, MOST_LINES = 12, 2450
HEADING = f"""# One iteration

The functions that lead from `main` to what a reader looks for, in the order in which they call each other;
frames of torch and Python are left out. `python -m tools walk` writes this page from a run of the demo, PPO by
separation on {RANKS} ranks (`make demo`), and a test compares.

What each instruction means is in `rlhf_spmd/plan/program/instructions.py`; `tests/slow_ppo.py` is PPO without any of
this, in the order of its formulas: read it first.

## Files to read

At most {MOST_FILES} files of at most {MOST_LINES:,} lines together are enough to follow PPO by separation from
`main` to the model and to a loss: its algorithm and strategy, the meaning of instructions, and every file of
`runtime/run`, `runtime/execute`, `runtime/engines`, `plan` and `algorithms` on that path. Skip the command line, the
inside of the model, kernels and the other paths of this page on a first reading.

"""


class Notes:
    """The stacks of this rank: [name, file, first line of its documentation] of each frame, by heading."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.found: dict[str, list[tuple[str, str, str]]] = {}

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        """Notes a call, for sys.setprofile."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(OWN):
            return
        if code.co_qualname == "RunFolder.close":
            sys.setprofile(None)
            path = self.folder / f"{os.getpid()}.json"
            path.write_text(json.dumps(self.found), encoding="utf-8")
            return
        for heading, (target, through) in WAYS.items():
            if heading in self.found or target not in (code.co_qualname, code.co_qualname.rpartition(".")[2]):
                continue
            stack = _stack(frame)
            names = {name for name, _, _ in stack}
            if IN_LOOP in names and through in {"", *names, *(Path(file).name for _, file, _ in stack)}:
                self.found[heading] = stack


def _stack(frame: FrameType | None) -> list[tuple[str, str, str]]:
    """Returns the frames of our own code from `main` on."""
    found = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(OWN):
            text = code.co_consts[0] if code.co_consts and isinstance(code.co_consts[0], str) else ""
            name = code.co_qualname.replace(".<locals>", "")
            found.append((name, Path(code.co_filename).relative_to(REPOSITORY).as_posix(), _sentence(text)))
        frame = frame.f_back
    return found[::-1]


def _about(file: str) -> str:
    return _sentence(ast.get_docstring(ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))) or "")


def to_read_more(ways: dict[str, list[list[str]]]) -> set[str]:
    """Returns the files on the way to the model that a reader is not told to read."""
    on_the_way = {file for heading in TO_THE_MODEL for _, file, _ in ways[heading] if file.startswith(ROOMS)}
    return on_the_way - set(TO_READ)


def _sentence(text: str) -> str:
    words = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.?]) (?=[A-Z`]|\w+:)", words)[0].rstrip(".:").replace("|", "\\|")


def stacks() -> dict[str, list[list[str]]]:
    """Runs one iteration of the demo -> the frames of each way; of several, the same one every time."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "--preset", "tiny", "--strategy", "separation", "strategy.chain=false", "--runs", folder]
        words += ["iterations=1", *SMALL]
        on_ranks(RANKS, ["walk", ON_A_RANK, folder, *words], package="tools")
        notes = [json.loads(path.read_text(encoding="utf-8")) for path in Path(folder).glob("*.json")]
    return {heading: min(one[heading] for one in notes if heading in one) for heading in WAYS}


def page(ways: dict[str, list[list[str]]]) -> str:
    """Returns the page of these ways."""
    longest = next(iter(ways.values()))
    fork = [name for name, _, _ in longest].index(FORK)
    read = ["| file | what |", "|---|---|", *(f"| `{file}` | {_about(file)} |" for file in TO_READ)]
    start = "\n## From `main` to an instruction\n\n" + _table(longest[: fork + 1])
    parts = [HEADING + "\n".join(read) + "\n" + start]
    for heading, frames in ways.items():
        names = [name for name, _, _ in frames]
        start = names.index(FORK) + 1 if FORK in names else names.index(IN_LOOP)
        parts.append(f"## {heading}\n\n" + _table(frames[start:]))
    return "\n".join(parts)


def _table(frames: list[list[str]]) -> str:
    rows = [f"| `{name}` | `{file}` | {text} |" for name, file, text in frames]
    return "\n".join(["| function | file | what it does |", "|---|---|---|", *rows, ""])


def main(arguments: list[str]) -> int:
    if arguments[:1] == [ON_A_RANK]:
        from rlhf_spmd.__main__ import main as program

        folder, *words = arguments[1:]
        sys.argv[1:] = words
        sys.setprofile(Notes(Path(folder)).note)
        return program()
    ways = stacks()
    PAGE.write_text(page(ways), encoding="utf-8")
    print(json.dumps({"tool": "walk", "ok": True}))
    return 0
