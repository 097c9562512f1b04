"""Writes the tables of README.md from bench/results/*.jsonl, between `<!-- rows: NAME -->` and `<!-- end -->`.

Cost: none. Command: python -m bench tables. A unit test fails when a table and its rows differ.
"""

import json
import re
from collections.abc import Callable

from bench.rows import REPOSITORY, RESULTS

BLOCK = re.compile(r"<!-- rows: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def main(arguments: list[str]) -> int:
    assert not arguments, "tables takes no options"
    readme = REPOSITORY / "README.md"
    readme.write_text(render(readme.read_text()))
    print(json.dumps({"bench": "tables", "ok": True}))
    return 0


def render(text: str) -> str:
    """The text with every block made anew from its rows."""
    return BLOCK.sub(lambda found: f"<!-- rows: {found[1]} -->\n{_table(found[1])}\n<!-- end -->", text)


def _table(name: str) -> str:
    rows = [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]
    columns = COLUMNS[name]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row) for cell in columns.values()) + " |" for row in rows]
    about = rows[0]
    versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
    return "\n".join([*lines, "", f"{about['date']}, commit {about['commit']}, {about['hardware']}, {versions}."])


Columns = dict[str, Callable[[dict], str]]
COLUMNS: dict[str, Columns] = {
    "invariance": {
        "ranks": lambda row: str(row["ranks"]),
        "strategy": lambda row: f"`{row['strategy']}`",
        "options": lambda row: row["options"] or "-",
        "tokens": lambda row: "identical" if row["same_tokens"] else "different",
        "largest error of losses, norms, KL, reward": lambda row: f"{row['metrics_error']:.1e}",
        "of the actor's weights": lambda row: f"{row['weights_error']:.1e}",
    },
    "demo_seeds": {
        "seed": lambda row: str(row["seed"]),
        "reward, first iteration": lambda row: f"{row['reward_first']:+.3f}",
        "its std": lambda row: f"{row['reward_std_first']:.3f}",
        "reward, last iteration": lambda row: f"{row['reward_last']:+.3f}",
        "gain in std": lambda row: f"{row['gain_in_std']:.2f}",
        "largest KL, nats": lambda row: f"{row['kl_largest']:.2f}",
        "seconds": lambda row: f"{row['wall_s']:.0f}",
    },
}
