"""Does this program compute what TRL computes from the same prompts, responses and rewards, and how much faster?

TRL lives in an environment of its own (`make peers`), in which its trainers run as they are. The parts:

equality: random Llamas in float64. An iteration of ours generates and scores responses of spread lengths; noise on the
    old logprobs makes both clips act; both programs take one step of SGD at learning rate 1 on these rows, and loss,
    gradients and weights after the step are compared weight by weight. Both programs cast to float32 in the midst of a
    float64 model; a case is compared without these casts, and as it is.
smollm2: the same with SmolLM2-135M in float32.

Cost on two cores: equality three minutes, smollm2 five.
Command: python -m bench against-trl [PART ...]; without a part, all
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from bench.against_trl import equality
from bench.against_trl.cases import CASES
from bench.rows import REPOSITORY, RESULTS, provenance, read_rows, write

ROWS = "against_trl"
SMOLLM2 = REPOSITORY / ".cache" / "smollm2-135m"


def small_models(folder: Path) -> list[dict]:
    return [row for setting in equality.small(folder) for row in equality.compared(setting, CASES, folder)]


def smollm2(folder: Path) -> list[dict]:
    setting = equality.smollm2(SMOLLM2, folder)
    return [row for case in CASES for row in equality.compared(setting, [case], folder)]


PARTS: dict[str, Callable[[Path], list[dict]]] = {"equality": small_models, "smollm2": smollm2}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench against-trl", description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parsed = parser.parse_args(arguments)
    if unknown := set(parsed.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if not equality.PEER.exists():
        parser.error("TRL's environment .venv-peers is not there; `make peers` makes it")
    parts = parsed.parts or list(PARTS)
    if parts != ["equality"] and not (SMOLLM2 / "model.safetensors").is_file():
        parser.error(f"{SMOLLM2} is not there; `make .cache/smollm2-135m/model.safetensors` fetches and converts it")
    torch.set_num_threads(equality.THREADS)
    ok = True
    for part in parts:
        with tempfile.TemporaryDirectory(prefix="against_trl_") as folder:
            rows = PARTS[part](Path(folder))
        keep(part, rows)
        ok &= all(row["ok"] for row in rows)
    print(json.dumps({"bench": "against-trl", "ok": ok}))
    return 0 if ok else 1


def keep(part: str, rows: list[dict]) -> None:
    """Writes these rows in place of those of the same part, with the versions of both programs."""
    path = RESULTS / f"{ROWS}.jsonl"
    others = [row for row in read_rows(path) if row["part"] != part] if path.exists() else []
    about = provenance()
    about["versions"] |= versions_of_peer()
    new = [{"bench": "against-trl", "part": part} | row | about for row in rows]
    write(ROWS, sorted(others + new, key=lambda row: list(PARTS).index(row["part"])))


def versions_of_peer() -> dict[str, str]:
    """TRL and what computes in its environment."""
    names = ["trl", "transformers", "torch"]
    command = [str(equality.PEER), "-c", f"from importlib.metadata import version as v; print(*map(v, {names}))"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return dict(zip(["trl", "its transformers", "its torch"], found, strict=True))
