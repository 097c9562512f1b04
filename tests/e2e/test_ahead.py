"""Runs that draw one iteration ahead, as users start them: a resume has the bits of an uninterrupted run, since the
batch in flight is in the checkpoint."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.page_runs import metrics, resume, timeless, trained
from tests.started import Started, num_iterations, outcome

BASE = ("--preset", "tiny", "--strategy", "separation", "strategy.ahead=1", "rollout_batch=16", "mini_batch=8")
SMALL = ("iterations=3", "checkpoint.every=1", "checkpoint.keep=9", "num_samples=0", "rollouts.every=1")


def tensors(run: Path, iteration: int) -> list[bytes]:
    folder = run / "checkpoints" / f"iteration-{iteration:06d}"
    return [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return trained([*BASE, *SMALL], 2, tmp_path_factory.mktemp("ahead") / "whole")


def interrupted(whole: Path, name: str, after: int) -> Path:
    """Returns a copy of the run as it was after some iterations."""
    run = whole.with_name(name)
    shutil.copytree(whole, run)
    for folder in (run / "checkpoints").iterdir():
        if int(folder.name.partition("-")[2]) > after:
            shutil.rmtree(folder)
    return run


def test_a_resume_trains_the_batch_in_flight(whole):
    run = interrupted(whole, "resumed", 1)
    assert {path.name for path in (run / "checkpoints" / "iteration-000001").glob("drawn-*")} == {
        "drawn-0001.safetensors"
    }
    assert not list((whole / "checkpoints" / "iteration-000003").glob("drawn-*"))  # there is no next iteration
    resume(run, 2)
    assert timeless(run) == timeless(whole) and len(timeless(run)) == 3
    assert tensors(run, 3) == tensors(whole, 3)
    files = [path.relative_to(whole) for path in (whole / "rollouts").rglob("*") if path.is_file()]
    assert files
    assert [file for file in files if (run / file).read_bytes() != (whole / file).read_bytes()] == []


@pytest.mark.slow
def test_sigterm_saves_the_batch_in_flight(tmp_path):
    """The step ends, and the resumed run trains what it has drawn, to the bits of an undisturbed run."""
    options = [*BASE, *SMALL, "checkpoint.every=0"]
    started = Started(2, tmp_path / "told", *options, "iterations=60")
    started.wait_for(1)
    os.kill(sorted(started.ranks())[0], signal.SIGTERM)
    status, stderr = started.end()
    reached = num_iterations(started.folder)
    assert status == 143 and f"ended by SIGTERM after {reached} of 60 iterations" in stderr and reached < 60
    last = max((started.folder / "checkpoints").glob("iteration-*"))
    assert last.name == f"iteration-{reached:06d}" and list(last.glob("drawn-*"))
    more = f"iterations={reached + 1}"
    resume(started.folder, 2, more)
    assert outcome(started.folder) == outcome(trained([*options, more], 2, tmp_path / "alone"))


PARTIAL = ("partial_steps=6", "iterations=5", "seed=1")


@pytest.fixture(scope="module")
def partial(tmp_path_factory) -> Path:
    return trained([*BASE, *SMALL, *PARTIAL], 2, tmp_path_factory.mktemp("partial") / "whole")


def test_a_resume_goes_on_with_responses_that_have_begun(partial):
    run = interrupted(partial, "resumed", 2)
    resume(run, 2)
    assert timeless(run) == timeless(partial) and max(row.get("lag", 0) for row in metrics(run)) > 2
    assert tensors(run, 5) == tensors(partial, 5)


@pytest.mark.slow
def test_a_resume_on_other_ranks_goes_on_with_the_same_tokens(partial):
    run = interrupted(partial, "on four ranks", 2)
    resume(run, 4)
    names = "tokens_sha256", "lag", "lag_tokens", "held_groups", "prompts_used", "response_length"
    found, wanted = ([[row.get(name) for name in names] for row in metrics(one)] for one in (run, partial))
    assert found == wanted
