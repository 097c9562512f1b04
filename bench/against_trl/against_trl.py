"""Does this program compute what TRL computes from the same prompts, responses and rewards, and how much faster?

TRL lives in an environment of its own (`make peers`), in which its trainers run as they are. The parts:

equality: random Llamas in float64. An iteration of ours generates and scores responses of spread lengths; noise on the
    old logprobs makes both clips act; both programs take one step of SGD at learning rate 1 on these rows, and loss,
    gradients and weights after the step are compared weight by weight. Both programs cast to float32 in the midst of a
    float64 model; a case is compared without these casts, and as it is.
given: the same for SFT, reward models and DPO, on rows that both programs read and tokenise themselves; tokens and
    metrics are compared, too.
steps: whole steps of SmolLM2-135M in turns, at full length and with spread lengths (steps.py).
given-steps: the same for SFT, reward models and DPO, with the peak of memory of both programs.
adapter-steps: SFT and DPO with adapters (LoRA) by both programs, and all weights by ours.

Cost on two cores: equality and given three minutes each, given-steps and adapter-steps ten, steps fifteen.
Command: python -m bench against-trl [PART ...] [--case LOSS]; without a part, all
"""

import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.against_trl import equality, steps
from bench.against_trl.cases import GIVEN_LOSSES, LOSSES, Case
from bench.against_trl.work import ADAPTED, WORKS, Work
from bench.rows import REPOSITORY, Arguments, keep, provenance
from bench.tables import text_table

KEYS = ("model", "case", "precision", "work", "peer")  # what tells rows of a part apart
SMOLLM2 = REPOSITORY / ".cache" / "smollm2-135m"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the bench.

    measure: a folder for files and the chosen cases -> rows, which stay in the file apart by their case.
    whole: of SmolLM2 rather than of small models.
    """

    file: str
    measure: Callable[[Path, Sequence], list[dict]]
    cases: Mapping[str, Case | Work]
    whole: bool = True


def equal(folder: Path, cases: Sequence[Case]) -> list[dict]:
    settings = equality.small(folder, given=cases[0].rows is not None)
    return [row for setting in settings for row in equality.compared(setting, cases, folder)]


PARTS = {
    "equality": Part("against_trl", equal, LOSSES, whole=False),
    "given": Part("against_trl_given", equal, GIVEN_LOSSES, whole=False),
    "steps": Part("against_trl_steps", lambda folder, _: steps.grpo(SMOLLM2, folder), {}),
    "given-steps": Part(
        "against_trl_given_steps", lambda folder, _: steps.given(SMOLLM2, folder, list(WORKS.values())), {}
    ),
    "adapter-steps": Part(
        "against_trl_adapter_steps", lambda folder, works: steps.adapted(SMOLLM2, folder, works), ADAPTED
    ),
}


def main(arguments: list[str]) -> int:
    parser = Arguments("against-trl", __doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    cases = [name for part in PARTS.values() for name in part.cases]
    parser.add_argument("--case", choices=cases, help="only this loss or work; the rows of others stay")
    parsed = parser.parse_args(arguments)
    if unknown := set(parsed.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if not equality.PEER.exists():
        parser.error("TRL's environment .venv-peers is not there; `make peers` makes it")
    parts = parsed.parts or list(PARTS)
    if parsed.case:
        parts = [part for part in parts if parsed.case in PARTS[part].cases] or parser.error("no part has this loss")
    if any(PARTS[part].whole for part in parts) and not (SMOLLM2 / "model.safetensors").is_file():
        parser.error(f"{SMOLLM2} is not there; `make .cache/smollm2-135m/model.safetensors` fetches and converts it")
    torch.set_num_threads(equality.THREADS)
    ok = True
    for name in parts:
        part = PARTS[name]
        with tempfile.TemporaryDirectory(prefix="against_trl_") as folder:
            chosen = [part.cases[parsed.case]] if parsed.case else list(part.cases.values())
            rows = part.measure(Path(folder), chosen)
        about = provenance()
        about["versions"] |= versions_of_peer()
        rows = [{"bench": "against-trl", "part": name} | row | about for row in rows]
        keep(part.file, rows, KEYS, lambda row, names=[*part.cases]: names.index(row["case"]) if names else 0)
        print(text_table(part.file, rows), flush=True)
        ok &= all(row["ok"] for row in rows)
    print(json.dumps({"bench": "against-trl", "ok": ok}))
    return 0 if ok else 1


def versions_of_peer() -> dict[str, str]:
    """Returns the versions of TRL and of what computes in its environment."""
    names = ["trl", "transformers", "torch"]
    command = [str(equality.PEER), "-c", f"from importlib.metadata import version as v; print(*map(v, {names}))"]
    found = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=True).stdout.split()
    return dict(zip(["trl", "its transformers", "its torch"], found, strict=True))
