"""Runs that are killed, told to end, or resumed as they may not be, as a user sees them.

A run killed with SIGKILL and resumed leaves what a run leaves that was let alone, to the bit.
"""

import fcntl
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from bench.faults.faults import STRATEGIES, strategy_words
from rlhf_spmd import embedded
from tests import warm as forks
from tests.folders import write_all
from tests.started import Started, num_iterations, outcome

LIMIT_S = 180.0
PREFIX = "rlhf_spmd: error: "


@pytest.fixture(scope="module")
def overrides(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    more = ["iterations=5", "checkpoint.every=1", "num_samples=2", "ppo.kl_controller=adaptive"]
    return [*write_all(folder), *more]


def train(num_ranks: int, *options: object) -> tuple[int | None, str, str]:
    return forks.shared().run(["train", "--json", *options], num_ranks if num_ranks > 1 else 0)


def done(num_ranks: int, *options: object) -> str:
    status, stdout, stderr = train(num_ranks, *options)
    assert status == 0, stderr
    return stdout


def kill_and_resume(overrides, folder: Path, num_ranks: int, *strategy: str, seed: int) -> None:
    """Kills a random rank at a random moment after the second iteration; then resumes the run."""
    dice = random.Random(seed)
    done(num_ranks, *overrides, *strategy, "--runs", folder, "--name", "undisturbed")
    started = Started(num_ranks, folder / f"killed-{seed}", *overrides, *strategy)
    started.wait_for(dice.randint(2, 4))
    time.sleep(dice.uniform(0, 0.15))
    ranks = started.ranks()
    assert sorted(ranks.values()) == list(range(num_ranks))
    pid = dice.choice(list(ranks))
    os.kill(pid, signal.SIGKILL)
    status, stderr = started.end()
    assert started.num_left() == 0
    assert f"rank {ranks[pid]} of {num_ranks}" in stderr and "SIGKILL" in stderr
    before = num_iterations(started.folder)
    assert status != 0 and 2 <= before <= 5
    stdout = done(num_ranks, "--resume", started.folder)
    assert "resumed" in stdout and json.loads(stdout.splitlines()[-1])["iterations"] == 5
    found, expected = outcome(started.folder), outcome(folder / "undisturbed")
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


def test_killed_and_resumed_is_the_same_run(overrides, tmp_path):
    kill_and_resume(overrides, tmp_path, 2, seed=1)


@pytest.mark.slow
def test_a_mixture_of_experts(tmp_path):
    """GRPO one iteration ahead: a checkpoint has the experts that the next batch took in generation."""
    words = ["--preset", "arithmetic", "--model", embedded.path_of("mixture/actor"), "num_samples=2", "eval.every=3"]
    words += ["iterations=3", "checkpoint.every=1", "checkpoint.keep=9", "rollout_batch=32", "mini_batch=16"]
    words += ["micro_batch=8", "--strategy", "separation", "strategy.ahead=1"]
    words += ["grpo.old_logprobs=current", "grpo.importance_weights=token"]
    done(2, *words, "--runs", tmp_path, "--name", "whole")
    half = shutil.copytree(tmp_path / "whole", tmp_path / "half")  # as after a kill
    shutil.rmtree(half / "checkpoints" / "iteration-000003")
    done(2, "--resume", half)
    found, expected = outcome(half), outcome(tmp_path / "whole")
    assert [name for name in expected if found[name] != expected[name]] == []
    assert all(row["route_disagreement"] < 0.05 for row in expected["metrics"])
    transformers = pytest.importorskip("transformers")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "actor").num_parameters() > 8e5


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "flattening"])
def test_under_every_strategy(overrides, tmp_path, strategy, seed):
    kill_and_resume(overrides, tmp_path, 4, *strategy_words(strategy, tmp_path), seed=seed)


def test_signals_and_another_number_of_ranks(overrides, tmp_path):
    """SIGUSR1 to one rank: a checkpoint, and on. SIGTERM to another one: a checkpoint, and the end of all with status
    143. Then on with three ranks under another strategy; it goes on as the undisturbed run does."""
    overrides = [*overrides, "checkpoint.every=0", "iterations=60"]
    started = Started(2, tmp_path / "run-told-to-end", *overrides)
    checkpoints = started.folder / "checkpoints"
    started.wait_for(2)
    pids = {rank: pid for pid, rank in started.ranks().items()}
    os.kill(pids[1], signal.SIGUSR1)
    end = time.monotonic() + LIMIT_S
    while not list(checkpoints.glob("iteration-*")):
        assert time.monotonic() < end and started.process.poll() is None
        time.sleep(0.01)
    os.kill(pids[0], signal.SIGTERM)
    status, stderr = started.end()
    reached = num_iterations(started.folder)
    assert status == 143 and reached < 60
    resume = f"python -m rlhf_spmd train --resume {started.folder}"
    assert (
        stderr == f"rlhf_spmd: ended by SIGTERM after {reached} of 60 iterations; resume with: mpirun -n 2 {resume}\n"
    )
    assert sorted(path.name for path in checkpoints.iterdir())[-1] == f"iteration-{reached:06d}"

    more = reached + 1
    stdout = done(3, "--resume", started.folder, "--strategy", "separation", f"iterations={more}")
    assert f"after {reached} of {more} iterations" in stdout
    assert json.loads(stdout.splitlines()[-1])["strategy"] == "separation"
    done(1, *overrides, f"iterations={more}", "--runs", tmp_path, "--name", "undisturbed")
    mine, theirs = outcome(started.folder)["metrics"], outcome(tmp_path / "undisturbed")["metrics"]
    assert [row["tokens_sha256"] for row in mine] == [row["tokens_sha256"] for row in theirs]
    for name in ("reward", "kl", "policy_loss", "value_loss", "actor_grad_norm", "kl_coef"):
        for one, other in zip(mine, theirs, strict=True):
            assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-5), name


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(overrides, tmp_path_factory) -> Path:
    """Returns a run of three iterations on one rank, with checkpoints of the last two."""
    folder = tmp_path_factory.mktemp("runs")
    done(1, *overrides, "iterations=3", "num_samples=0", "--runs", folder, "--name", "finished")
    return folder / "finished"


@pytest.fixture(scope="module")
def refused(warm):
    """Returns refused(*options), which returns the message."""

    def message(*options) -> str:
        status, _, stderr = warm.run(["train", *options])
        assert status == 2 and stderr.startswith(PREFIX) and "Traceback" not in stderr, stderr
        return stderr.removeprefix(PREFIX).strip()

    return message


@pytest.mark.parametrize(("option", "what"), [("data.prompts=", "prompts"), ("models.reward=", "model")])
def test_other_inputs_are_refused(finished, overrides, option, what, refused):
    """An additional prompt, or a changed weight of the reward model."""
    named = Path(next(text for text in overrides if text.startswith(option)).partition("=")[2])
    path = named if named.is_file() else named / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"prompt": "ba"}\n' if named.is_file() else whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        message = refused("--resume", finished)
    finally:
        path.write_bytes(whole)
    assert f"the {what} in {named} changed since {finished} was started" in message


def test_a_folder_in_use_is_refused(finished, refused):
    with (finished / ".lock").open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert f"{finished} is in use" in refused("--resume", finished)


def test_a_finished_run_has_nothing_left_to_do(finished):
    before = outcome(finished)
    stdout = done(1, "--resume", finished)
    assert json.loads(stdout.splitlines()[-1])["iterations"] == 3 and outcome(finished) == before


def test_without_a_checkpoint_it_begins_again(finished, tmp_path):
    """As a run that was killed before its first one: config, strategy and some metrics are there, and no more."""
    folder = tmp_path / "young"
    folder.mkdir()
    for name in ("config.json", "strategy.py", "program.json", "metrics.jsonl"):
        (folder / name).write_bytes((finished / name).read_bytes())
    stdout = done(1, "--resume", folder)
    assert "has no checkpoint yet: it starts again at iteration 1" in stdout
    found, expected = outcome(folder), outcome(finished)
    assert [name for name in expected if name != "samples.jsonl" and found[name] != expected[name]] == []


def test_resume_auto_starts_a_run_and_goes_on(overrides, tmp_path):
    """The same line, as a job that is put back into the queue gives it; only other options are refused, by name."""
    line = [*overrides, "iterations=1", "--runs", tmp_path, "--name", "mine", "--resume", "auto"]
    (tmp_path / "mine").mkdir()  # without config.json it is as if it were not there
    assert "resumed" not in done(1, *line)
    assert "after 1 of 2 iterations" in done(1, *line, "iterations=2", "--strategy", "flattening")
    assert len((tmp_path / "mine" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    for more, message in [
        (["ppo.kl_coef=0.5"], "ppo.kl_coef=0.5 would change the results of"),
        (["--algorithm", "rloo", "samples_per_prompt=2"], "samples_per_prompt=2 would change the results of"),
        (["--preset", "smollm2"], "was started with preset tiny, not smollm2: give --name a new name"),
    ]:
        status, _, stderr = train(1, *line, "iterations=2", *more)
        assert status == 2 and message in stderr, stderr
    status, _, stderr = train(1, *overrides, "--resume", "auto")
    assert status == 2 and "give --name NAME" in stderr
