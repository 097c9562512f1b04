"""Runs of a page as a user starts them, and what two runs must have in common."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
from safetensors import safe_open

from bench.rows import TIMED
from tests import warm

REALLOCATION = ("--strategy", "reallocation", "strategy.training_tp=2", "strategy.training_pp=2")
PLACED = ("moved_bytes", "moved_messages", "parity_max_abs")  # what depends on the placement


def trained(words: Sequence[str], num_ranks: int, run: Path) -> Path:
    """Returns the run folder of a training with these words of the command line."""
    _train([*words, "--runs", str(run.parent), "--name", run.name], num_ranks)
    return run


def resume(run: Path, num_ranks: int, *words: str) -> None:
    _train(["--resume", str(run), *words], num_ranks)


def _train(words: Sequence[str], num_ranks: int) -> None:
    status, stdout, stderr = warm.shared().run(["train", *words], num_ranks if num_ranks > 1 else 0)
    assert status == 0, stdout + stderr


def metrics(run: Path, file: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run / file).read_text(encoding="utf-8").splitlines()]


def timeless(run: Path, timed: Collection[str] = TIMED, file: str = "metrics.jsonl") -> list[dict]:
    return [{name: value for name, value in row.items() if name not in timed} for row in metrics(run, file)]


def evaluations(run: Path) -> list[dict]:
    return timeless(run, file="evaluations.jsonl")


def hashes(run: Path) -> list[str]:
    return [row["tokens_sha256"] for row in metrics(run)]


def weights(run: Path) -> list[float]:
    """Returns every float32 master of the last checkpoint that one rank has, sorted: their order differs between
    layouts."""
    last, found = max((run / "checkpoints").glob("iteration-*")), []
    for path in last.glob("rank-*.safetensors"):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                if "master" in name:
                    found += file.get_tensor(name).flatten().tolist()
    return sorted(found)


def assert_same(run: Path, other: Path, where: str) -> None:
    """Asserts the same tokens, and numbers within 1e-5, except for what depends on the placement."""
    for mine, theirs in zip(metrics(run), metrics(other), strict=True):
        assert mine.get("tokens_sha256") == theirs.get("tokens_sha256"), where
        for key in theirs.keys() - {*TIMED, *PLACED, "tokens_sha256"}:
            assert mine[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-5), (where, key)
    assert weights(run) == pytest.approx(weights(other), rel=1e-4, abs=2e-5), where
