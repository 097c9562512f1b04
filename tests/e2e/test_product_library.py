"""The library of products of a run: the first start measures, another one reads what it found; what each computes does
not depend on the placement, and a resume goes on with it."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from rlhf_spmd.kernels.products import LIBRARIES
from tests import warm
from tests.folders import write_all
from tests.page_runs import hashes
from tests.run_mpi import mpi_command, mpi_environment, run_limited
from tests.started import Started, outcome

SIZES = {"hidden_size": 256, "intermediate_size": 320, "head_dim": 64}  # with matrices that a library is chosen for


@pytest.fixture
def cache(tmp_path) -> Path:
    """Returns the cache of a user who has not run anything."""
    return tmp_path / "cache" / "rlhf_spmd" / "products"


def train(cache: Path, *words) -> None:
    status, _, stderr = warm.shared().run(["train", *words], XDG_CACHE_HOME=str(cache.parents[1]))
    assert status == 0, stderr


# ---- each library ----------------------------------------------------------------------------------------------------

PLACEMENTS = (
    (2, "flattening", "strategy.zero=1"),
    (4, "separation"),
    (4, "flattening", "strategy.tp=2"),
    (5, "interleaving2"),
    (8, "separation"),
)


def job(*words, num_ranks: int = 1, **environment: str) -> None:
    launcher = mpi_command(num_ranks) if num_ranks > 1 else []
    command = [*launcher, sys.executable, "-m", "rlhf_spmd", "train", *map(str, words)]
    status, _, stderr = run_limited(command, limit_s=300.0, environment=mpi_environment(**environment))
    assert status == 0, stderr


@pytest.mark.slow
@pytest.mark.parametrize("library", [name for name, one in LIBRARIES.items() if one.exists(torch.float32)])
def test_the_same_run_anywhere(tmp_path, library):
    """On 1 to 8 ranks the tokens are those of one rank; with other instructions, too; killed and resumed, all bits."""
    words = [*write_all(tmp_path, **SIZES), f"products={library}", "iterations=6", "num_samples=0"]
    words += ["optimizer.actor_lr=1e-4", "optimizer.critic_lr=1e-4"]  # larger steps amplify rounding
    words += ["parity_tolerance=1e-3"]  # rounding with these random weights gave up to 1.1e-4
    words += ["checkpoint.every=2", "generation.max_new_tokens=24", "--runs", tmp_path]
    job(*words, "--name", "one")
    for number, (num_ranks, strategy, *options) in enumerate(PLACEMENTS):
        name = f"placed-{number}"
        job(*words, "--name", name, "--strategy", strategy, *options, num_ranks=num_ranks)
        assert hashes(tmp_path / name) == hashes(tmp_path / "one"), (num_ranks, strategy, options)
    if library != "native":  # its instructions are chosen when it is loaded, and all give the same bits
        job(*words, "--name", "others", ONEDNN_MAX_CPU_ISA="SSE41", MKL_ENABLE_INSTRUCTIONS="SSE4_2")
        assert hashes(tmp_path / "others") == hashes(tmp_path / "one")
    stopped = Started(2, tmp_path / "stopped", *words[:-2])
    stopped.wait_for(3)
    for pid in stopped.ranks():
        with suppress(ProcessLookupError):  # the first kill ends them all
            os.kill(pid, signal.SIGKILL)
    stopped.end()
    job("--resume", tmp_path / "stopped", num_ranks=2)
    job(*words, "--name", "two", num_ranks=2)
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "two")
