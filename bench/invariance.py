"""One run of the embedded model at several numbers of ranks and under several placements: tokens, metrics and weights.

Cost: minutes. Command: python -m bench invariance [--quick]
"""

import argparse
import json
import tempfile
from pathlib import Path

from bench.rows import REPOSITORY, train, write

CASES = [  # ranks, options
    (1, []),
    (2, []),
    (4, []),
    (5, []),
    (8, []),
    (2, ["strategy.zero=1"]),
    (2, ["strategy.zero=2"]),
    (4, ["strategy.zero=2"]),
    (2, ["strategy.zero=3"]),
    (2, ["--strategy", "strategies/_template.py"]),
    (4, ["--strategy", "strategies/_template.py"]),
    (5, ["--strategy", "strategies/_template.py"]),
]
COMPARED = ("policy_loss", "value_loss", "actor_grad_norm", "critic_grad_norm", "kl", "reward")
TOLERANCE = 1e-5  # times max(1, |value|)
RUN = ["iterations=3", "seed=7"]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench invariance", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the first three cases only")
    parsed = parser.parse_args(arguments)
    rows, base = [], None
    print("ranks  strategy        options            tokens     largest error  weights")
    with tempfile.TemporaryDirectory() as runs:
        for ranks, options in CASES[:3] if parsed.quick else CASES:
            result, metrics = train(ranks, ["--runs", runs, *RUN, *options])
            weights = read_weights(Path(result["run_dir"]) / "actor")
            base = base or (metrics, weights)
            row = {
                "bench": "invariance",
                "ranks": ranks,
                "strategy": result["strategy"],
                "options": " ".join(option for option in options if "=" in option),
                "same_tokens": [m["tokens_sha256"] for m in metrics] == [m["tokens_sha256"] for m in base[0]],
                "metrics_error": max(
                    error(m[name], b[name]) for m, b in zip(metrics, base[0], strict=True) for name in COMPARED
                ),
                "weights_error": max(float(scaled(weights[name], base[1][name]).max()) for name in weights),
                "wall_s": result["wall_s"],
            }
            row["ok"] = row["same_tokens"] and max(row["metrics_error"], row["weights_error"]) <= TOLERANCE
            rows.append(row)
            same = "identical" if row["same_tokens"] else "DIFFERENT"
            print(
                f"{ranks:5}  {row['strategy']:<14}  {row['options']:<17}  {same}  {row['metrics_error']:13.1e}  "
                f"{row['weights_error']:.1e}",
                flush=True,
            )
    path = write("invariance", rows) if not parsed.quick else None
    ok = all(row["ok"] for row in rows)
    shown = str(path.relative_to(REPOSITORY)) if path else None
    print(json.dumps({"bench": "invariance", "cases": len(rows), "rows": shown, "ok": ok}))
    return 0 if ok else 1


def error(value: float, expected: float) -> float:
    """|value - expected| / max(1, |expected|)."""
    return abs(value - expected) / max(1.0, abs(expected))


def scaled(values, expected):
    return (values - expected).abs() / expected.abs().clamp(min=1.0)


def read_weights(folder: Path) -> dict:
    from safetensors.torch import load_file

    return {name: tensor.double() for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
