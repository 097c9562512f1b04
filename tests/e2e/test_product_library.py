"""The library of products of a run: the first start measures, another one reads what it found."""

import json
import sys
from pathlib import Path

import pytest

from bench.faults.faults import outcome
from rlhf_spmd.files import user_cache
from tests.folders import write_all
from tests.run_mpi import mpi_environment, run_limited

SIZES = {"hidden_size": 256, "intermediate_size": 320, "head_dim": 64}  # with matrices that a library is chosen for


@pytest.fixture
def cache(tmp_path) -> Path:
    """Of a user who knows these tokenizers, but no library of products."""
    folder = tmp_path / "cache" / "rlhf_spmd"
    folder.mkdir(parents=True)
    (folder / "tokenizers").symlink_to(user_cache("tokenizers"))
    return folder / "products"


def train(cache: Path, *words) -> None:
    command = [sys.executable, "-m", "rlhf_spmd", "train", *map(str, words)]
    environment = mpi_environment() | {"XDG_CACHE_HOME": str(cache.parents[1])}
    status, _, stderr = run_limited(command, limit_s=180.0, environment=environment)
    assert status == 0, stderr


@pytest.mark.timed
def test_two_starts_of_a_command(tmp_path, cache):
    words = [*write_all(tmp_path, **SIZES), "products=auto", "iterations=2", "num_samples=0"]
    runs = [tmp_path / name for name in ("first", "second")]
    for run in runs:
        train(cache, *words, "--runs", tmp_path, "--name", run.name)
    assert outcome(runs[0]) == outcome(runs[1])
    tables = [json.loads((run / "program.json").read_text(encoding="utf-8"))["products"] for run in runs]
    (kept,) = cache.iterdir()
    assert tables[0] == tables[1] == json.loads(kept.read_text(encoding="utf-8"))
