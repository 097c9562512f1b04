"""Does this program compute what TRL computes from the same prompts, responses and rewards, and how much faster?

TRL lives in an environment of its own (`make peers`), in which its trainers run as they are. The parts:

equality: random Llamas in float64. An iteration of ours generates and scores responses of spread lengths; noise on the
    old logprobs makes both clips act; both programs take one step of SGD at learning rate 1 on these rows, and loss,
    gradients and weights after the step are compared weight by weight. Both programs cast to float32 in the midst of a
    float64 model; a case is compared without these casts, and as it is.
given: the same for SFT, reward models and DPO, on rows that both programs read and tokenise themselves (given.py);
    tokens and metrics are compared, too.
smollm2: equality with SmolLM2-135M in float32.
steps: whole steps of SmolLM2-135M in turns, at full length and with spread lengths (steps.py).
given-steps: the same for SFT, reward models and DPO, with the peak of memory of both programs (given_steps.py).
adapter-steps: SFT and DPO with adapters (LoRA) by both programs, and all weights by ours (adapter_steps.py).

Cost on two cores: equality and given three minutes each, smollm2, given-steps and adapter-steps ten, steps fifteen.
Command: python -m bench against-trl [PART ...] [--case LOSS]; without a part, all
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from bench.against_trl import adapter_steps, equality, given, given_steps, steps
from bench.against_trl.cases import LOSSES, Case
from bench.against_trl.given_cases import GIVEN_LOSSES, GivenCase
from bench.against_trl.given_work import ADAPTED, GivenWork
from bench.rows import REPOSITORY, RESULTS, provenance, read_rows, write

SMOLLM2 = REPOSITORY / ".cache" / "smollm2-135m"
FILES = {  # of a part's rows
    "equality": "against_trl",
    "given": "against_trl_given",
    "smollm2": "against_trl",
    "steps": "against_trl_steps",
    "given-steps": "against_trl_given_steps",
    "adapter-steps": "against_trl_adapter_steps",
}


def small_models(folder: Path, cases: Sequence[Case]) -> list[dict]:
    return [row for setting in equality.small(folder) for row in equality.compared(setting, cases, folder)]


def given_rows(folder: Path, cases: Sequence[GivenCase]) -> list[dict]:
    return [row for setting in given.small(folder) for row in given.compared(setting, cases, folder)]


def smollm2(folder: Path, cases: Sequence[Case]) -> list[dict]:
    setting = equality.smollm2(SMOLLM2, folder)
    return [row for case in cases for row in equality.compared(setting, [case], folder)]


def whole_steps(folder: Path, _: Sequence) -> list[dict]:
    return steps.measured(SMOLLM2, folder)


def given_whole_steps(folder: Path, _: Sequence) -> list[dict]:
    return given_steps.measured(SMOLLM2, folder)


def adapter_whole_steps(folder: Path, works: Sequence[GivenWork]) -> list[dict]:
    return adapter_steps.measured(SMOLLM2, folder, works)


PARTS: dict[str, Callable[[Path, Sequence], list[dict]]] = {
    "equality": small_models,
    "given": given_rows,
    "smollm2": smollm2,
    "steps": whole_steps,
    "given-steps": given_whole_steps,
    "adapter-steps": adapter_whole_steps,
}
LOSSES_OF: dict[str, Mapping[str, Case | GivenCase | GivenWork]] = {  # of a part
    "equality": LOSSES,
    "given": GIVEN_LOSSES,
    "smollm2": LOSSES,
    "steps": {},
    "given-steps": {},
    "adapter-steps": ADAPTED,
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench against-trl", description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    cases = {**LOSSES, **GIVEN_LOSSES, **ADAPTED}
    parser.add_argument("--case", choices=[*cases], help="only this loss or work; the rows of others stay")
    parsed = parser.parse_args(arguments)
    if unknown := set(parsed.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if not equality.PEER.exists():
        parser.error("TRL's environment .venv-peers is not there; `make peers` makes it")
    parts = parsed.parts or list(PARTS)
    if parsed.case:
        parts = [part for part in parts if parsed.case in LOSSES_OF[part]] or parser.error("no such part has this loss")
    if set(parts) - {"equality", "given"} and not (SMOLLM2 / "model.safetensors").is_file():
        parser.error(f"{SMOLLM2} is not there; `make .cache/smollm2-135m/model.safetensors` fetches and converts it")
    torch.set_num_threads(equality.THREADS)
    ok = True
    for part in parts:
        with tempfile.TemporaryDirectory(prefix="against_trl_") as folder:
            losses = LOSSES_OF[part]
            rows = PARTS[part](Path(folder), [losses[parsed.case]] if parsed.case else list(losses.values()))
        keep(part, rows)
        ok &= all(row["ok"] for row in rows)
    print(json.dumps({"bench": "against-trl", "ok": ok}))
    return 0 if ok else 1


def keep(part: str, rows: list[dict]) -> None:
    """Writes these rows in place of those of the same part and losses, with the versions of both programs."""
    path, measured = RESULTS / f"{FILES[part]}.jsonl", {(part, row.get("case")) for row in rows}
    old = read_rows(path) if path.exists() else []
    others = [row for row in old if (row["part"], row.get("case")) not in measured]
    about = provenance()
    about["versions"] |= versions_of_peer()
    new = [{"bench": "against-trl", "part": part} | row | about for row in rows]
    names = list(LOSSES_OF[part])

    def place(row: dict) -> tuple[int, int]:
        return list(PARTS).index(row["part"]), names.index(row["case"]) if "case" in row else 0

    write(FILES[part], sorted(others + new, key=place))


def versions_of_peer() -> dict[str, str]:
    """TRL and what computes in its environment."""
    names = ["trl", "transformers", "torch"]
    command = [str(equality.PEER), "-c", f"from importlib.metadata import version as v; print(*map(v, {names}))"]
    found = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=True).stdout.split()
    return dict(zip(["trl", "its transformers", "its torch"], found, strict=True))
