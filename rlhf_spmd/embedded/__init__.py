"""The embedded default: a small model, its reward model and a prompt set, so that `--preset tiny` needs no download.

`python -m bench make-embedded` made everything in `tiny/` from the text of a grammar; `made.json` there holds quality
measurements.
"""

from __future__ import annotations

from pathlib import Path

from rlhf_spmd.errors import UserError

ITEMS = {
    "actor": "tiny/actor",
    "reward": "tiny/reward",
    "prompts.jsonl": "tiny/prompts.jsonl",
    "made.json": "tiny/made.json",
    "sentiment_prompts.txt": "sentiment_prompts.txt",  # for the preset smollm2
}


def path_of(name: str) -> Path:
    """The path of an embedded item, a model folder or a file."""
    assert name in ITEMS, f"no embedded '{name}'; there are {', '.join(ITEMS)}"
    path = Path(__file__).parent / ITEMS[name]
    if not path.exists():
        raise UserError(f"the embedded {name} is not at {path}: reinstall the package")
    return path
