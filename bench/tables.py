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


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


Columns = dict[str, Callable[[dict], str]]
COLUMNS: dict[str, Columns] = {
    "invariance": {
        "ranks": lambda row: str(row["ranks"]),
        "strategy": lambda row: f"`{row['strategy']}`",
        "options": lambda row: row["options"] or "-",
        "tokens of 3 seeds": lambda row: "identical" if row["same_tokens"] else "different",
        "largest error of losses, norms, KL, reward": lambda row: f"{row['metrics_error']:.1e}",
        "of the weights": lambda row: f"{row['weights_error']:.1e}",
    },
    "bfloat16": {
        "ranks": lambda row: str(row["ranks"]),
        "strategy": lambda row: f"`{row['strategy']}`",
        "reward, first iteration": lambda row: f"{row['rewards'][0]:+.3f}",
        "tenth": lambda row: f"{row['rewards'][-1]:+.3f}",
        "difference from one rank, in standard errors": lambda row: f"{row['difference']:.2f}",
    },
    "overlap": {
        "strategy": lambda row: f"`{row['strategy']}`",
        "slowed calls alone, s": lambda row: f"{row['slowed_s']:.2f}",
        "critical path, s": lambda row: f"{row['forecast_s']:.2f}",
        "measured, s": lambda row: f"{row['measured_s']:.2f}",
        "ratio": lambda row: f"{row['ratio']:.2f}",
    },
    "strategies": {
        "ranks": lambda row: str(row["ranks"]),
        "strategy": lambda row: f"`{row['strategy']}`",
        "options": lambda row: row["options"] or "-",
        "iteration, s": lambda row: f"{row['iteration_s']:.2f}",
        "moved, KiB": lambda row: f"{row['moved_bytes'] / 1024:,.0f}",
        "messages": lambda row: str(row["moved_messages"]),
        "most held by a rank, MiB": lambda row: f"{row['static_bytes'] / 2**20:.1f}",
        "computing": lambda row: _percent(row["compute_share"]),
        "waiting for peers": lambda row: _percent(row["waiting_share"]),
        "control": lambda row: _percent(row["control_share"]),
    },
    "reallocation": {
        "pair": lambda row: row["pair"],
        "weights, MB": lambda row: f"{row['weight_bytes'] / 1e6:.0f}",
        "moved, MB": lambda row: f"{row['moved_bytes'] / 1e6:.1f}",
        "lower bound, MB": lambda row: f"{row['lower_bound_bytes'] / 1e6:.1f}",
        "reallocation, s": lambda row: f"{row['ours_s']:.3f}",
        "by sockets alone, s": lambda row: f"{row['sockets_s']:.3f}",
        "gather and broadcast, s": lambda row: f"{row['baseline_s']:.3f}",
        "speed-up": lambda row: f"{row['speed_up']:.1f}",
        "extra memory, MiB": lambda row: f"{row['extra_bytes'] / 2**20:.1f}",
    },
    "generate": {
        "model": lambda row: row["model"],
        "precision": lambda row: row["dtype"],
        "responses": lambda row: f"{row['requests']}, {row['work']}",
        "tokens/s": lambda row: f"{row['ours_tokens_per_s']:,.0f}",
        "transformers": lambda row: f"{max(row['peers_tokens_per_s'].values()):,.0f}",
        "times faster": lambda row: f"{row['ratio']:.2f}",
        "asked": lambda row: f"{row['promised']:g}",
        "share of the floor": lambda row: _percent(row.get("share_of_floor")),
    },
    "kernels": {
        "kernel": lambda row: f"`{row['kernel']}`",
        "shape": lambda row: row["shape"],
        "precision": lambda row: row["dtype"],
        "ms": lambda row: f"{1e3 * row['ours_s']:.2f}",
        "times faster than": lambda row: ", ".join(f"{name} {x:.2f}" for name, x in row["times_faster"].items()),
        "of memory bandwidth": lambda row: _percent(row.get("share_of_memory")),
        "of matrix rate": lambda row: _percent(row.get("share_of_matrix")),
        "extra memory, of full logits": lambda row: _percent(row.get("peak_share")),
    },
    "validate": {
        "system": lambda row: row["system"],
        "actor, critic": lambda row: f"{row['actor_b']}B, {row['critic_b']}B",
        "GPUs": lambda row: row["n_gpus"],
        "new tokens": lambda row: row["gen_len"],
        "forecast, s": lambda row: f"{row['forecast_s']:.1f}",
        "published, s": lambda row: f"{float(row['sec_per_iter']):.1f}",
        "error": lambda row: f"{row['error']:+.1%}",
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
