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
Command: python -m bench against-trl [PART ...]; without a part, all
"""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from bench.against_trl import equality, steps
from bench.against_trl.cases import GIVEN_LOSSES, LOSSES, Case
from bench.against_trl.work import THREADS, python_of, trl_worker, versions_of, worker
from bench.rows import Arguments, provenance, write
from bench.tables import finished, text_table


def equal(folder: Path, cases: Sequence[Case]) -> list[dict]:
    """Measures the rows of some losses on all models."""
    settings = equality.small(folder, given=cases[0].rows is not None)
    with worker(trl_worker(folder), folder / "trl.log") as by_trl:
        return [row for setting in settings for row in equality.compared(setting, cases, folder, by_trl)]


PARTS: dict[str, Callable[[Path], list[dict]]] = {
    "equality": partial(equal, cases=[*LOSSES.values()]),
    "given": partial(equal, cases=[*GIVEN_LOSSES.values()]),
    "steps": steps.grpo,
    "given-steps": steps.given,
    "adapter-steps": steps.adapted,
}


def main(arguments: list[str]) -> int:
    parser = Arguments("against-trl", __doc__)
    parser.add_some("parts", PARTS, "PART")
    parsed, ok = parser.parse_args(arguments), True
    versions = versions_of(python_of("peers"), "trl", "transformers", "torch")
    torch.set_num_threads(THREADS)
    for part in parsed.parts:
        with tempfile.TemporaryDirectory(prefix="against_trl_") as folder:
            rows = PARTS[part](Path(folder))
        about = provenance()
        about["versions"] |= versions
        name = "against_trl" if part == "equality" else f"against_trl_{part.replace('-', '_')}"
        write(name, [{"bench": "against-trl", "part": part} | row | about for row in rows])
        print(text_table(name, rows), flush=True)
        ok &= all(row["ok"] for row in rows)
    return finished("against-trl", ok=ok)
