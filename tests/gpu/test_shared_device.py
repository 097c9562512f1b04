"""Ranks that share a GPU draw the tokens of one rank that has it alone."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.run_mpi import mpi_command, mpi_environment, run_limited

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SMALL = ("iterations=2", "rollout_batch=16", "mini_batch=8", "num_samples=0")


def tokens(folder: Path, num_ranks: int, *options: str) -> list[str]:
    command = [*mpi_command(num_ranks), sys.executable, "-m", "rlhf_spmd", "train", *SMALL, *options]
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    status, stdout, stderr = run_limited(
        [*command, "--runs", str(folder), "--name", "run"],
        limit_s=300,
        environment=mpi_environment(CUDA_VISIBLE_DEVICES=seen),
    )
    assert status == 0, stderr
    assert ("shared by" in stdout) == (num_ranks > 1)
    return [
        json.loads(line)["tokens_sha256"]
        for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


@pytest.mark.parametrize("strategy", ["flattening", "separation", "reallocation"])
def test_the_same_tokens_as_alone(strategy, tmp_path):
    alone = tokens(tmp_path / "alone", 1, "device=cuda")
    assert tokens(tmp_path / "shared", 4, "device=shared", "--strategy", strategy) == alone
