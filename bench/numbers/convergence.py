"""Does the placement change what is learned? Reward and KL of the embedded model under six strategies, compared.

Four ranks, float32, ten iterations with one seed. The curves must be those of flattening to TOLERANCE. They are drawn
beside the rows, as convergence.png.

Cost: five minutes on two cores. Command: python -m bench convergence [--again]
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.faults.faults import strategy_words
from bench.rows import Arguments, fill, train, written
from bench.tables import ended

NUM_RANKS = 4
WORDS = ("iterations=10", "num_samples=0")
STRATEGIES = ("flattening", "interleaving1", "interleaving2", "separation", "reallocation", "heterogeneous")
TOLERANCE = 1e-4  # of mean rewards, and of nats
LEAST = 1e-9  # that is drawn on a log scale
CURVES = {"rewards": "mean reward", "kls": "KL to the reference, nats"}


def measured(case: dict) -> dict:
    """Returns the row of a strategy."""
    with tempfile.TemporaryDirectory() as name:
        words = ["--runs", name, *strategy_words(case["strategy"], Path(name)), *WORDS]
        _, metrics = train(NUM_RANKS, words)
    return {"ranks": NUM_RANKS, "rewards": [row["reward"] for row in metrics], "kls": [row["kl"] for row in metrics]}


def compared(rows: list[dict]) -> list[dict]:
    """Returns the rows with their largest difference from the first one in an iteration."""
    base = rows[0]
    found = []
    for row in rows:
        pairs = (pair for curve in CURVES for pair in zip(row[curve], base[curve], strict=True))
        difference = max(abs(one - other) for one, other in pairs)
        found.append(row | {"difference": difference, "ok": difference <= TOLERANCE})
    return found


def draw(rows: Sequence[dict], path: Path) -> None:
    """Draws the curves of all strategies, and below them how far each is from the first."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    figure.suptitle(f"Does the placement change what is learned? Measured: {NUM_RANKS} ranks, embedded model, float32")
    panels = figure.subplots(2, 2, sharex=True)
    for (curves, differences), (curve, label) in zip(panels.T, CURVES.items(), strict=True):
        for number, row in enumerate(rows):
            iterations = range(1, len(row[curve]) + 1)
            curves.plot(iterations, row[curve], label=row["strategy"], lw=6 - number, alpha=0.7)
            far = [max(LEAST, abs(one - other)) for one, other in zip(row[curve], rows[0][curve], strict=True)]
            differences.plot(iterations, far, marker="o", ms=3)
        curves.set_title(label)
        differences.axhline(TOLERANCE, color="black", ls="--", label="promised")
        differences.set(yscale="log", xlabel="iteration", ylabel=f"difference from {rows[0]['strategy']}")
    panels[0][0].legend(fontsize="small")
    panels[1][0].legend(fontsize="small")
    figure.savefig(path, dpi=110)


def main(arguments: list[str]) -> int:
    Arguments("convergence", __doc__, fills=True).parse_args(arguments)
    rows = fill("convergence", [{"strategy": name} for name in STRATEGIES], measured, finish=compared)
    draw(rows, written("convergence").with_suffix(".png"))
    return ended("convergence", rows, largest_difference=max(row["difference"] for row in rows))
