"""`make demo-tools` on five fixed seeds: does GRPO raise the share of held-out questions answered right to 80%, in two
minutes?

The words of these questions are in no prompt. The row also has the share of those whose numbers and sign are in no
prompt, either, and of what the first model answers right without a tool: in episodes of one turn.

Cost: five times the demo, about six minutes; --missing goes on after an interruption. Command: python -m bench
demo-tools-seeds [--missing]
"""

import json
import subprocess
import sys
from pathlib import Path

from bench.numbers.demo_grpo_seeds import NUM_RANKS, measure, parse
from bench.rows import REPOSITORY, read_rows
from rlhf_spmd import embedded

MOST_FIRST, MOST_WITHOUT, LEAST_ACCURACY, MOST_S = 0.4, 0.1, 0.8, 120.0
WRITTEN = "rollouts.every=1000"  # all evaluations, and of the iterations the first one


def main(arguments: list[str]) -> int:
    parsed, alone = parse("demo-tools-seeds", __doc__, arguments), without_tools()
    parsed.overrides.insert(0, WRITTEN)
    held_out, prompts = (read_rows(embedded.path_of(f"tools/{name}.jsonl")) for name in ("held_out", "prompts"))

    def is_ok(row: dict, run: Path) -> bool:
        last = max((run / "rollouts").glob("evaluation-*"))
        said = [one for part in sorted(last.glob("*.jsonl")) for one in read_rows(part)]
        new = unseen(said, held_out, prompts)
        row |= {"without_tools": alone, "num_unseen": len(new), "unseen": sum(new) / len(new)}
        few = row["accuracy_first"] <= MOST_FIRST and alone <= MOST_WITHOUT
        return few and min(row["accuracy_last"], row["unseen"]) >= LEAST_ACCURACY

    return measure("demo-tools-seeds", "tools", parsed, is_ok, most_s=MOST_S)


def without_tools() -> float:
    """The share of the held-out questions that the first model answers right in its first turn."""
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    words = ["evaluate", "--preset", "tools", "--json", "episode.max_turns=1"]
    command = [mpirun, "-n", str(NUM_RANKS), sys.executable, "-m", "rlhf_spmd", *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, encoding="utf-8", check=True)
    return json.loads(done.stdout.strip().rpartition("\n")[2])["mean@1"]


def unseen(said: list[dict], held_out: list[dict], prompts: list[dict]) -> list[float]:
    """The scores of the answers to held-out questions whose numbers and sign no prompt has."""
    known = {numbers_of(one) for one in prompts}
    return [one["scores"] for one in said if numbers_of(held_out[one["prompt_index"]]) not in known]


def numbers_of(row: dict) -> tuple[int, str, int]:
    """Those of a question such as `amo*tiv`, with the sign."""
    text = row["prompt"][0]["content"]
    return row["table"][text[:3]], text[3], row["table"][text[4:]]
