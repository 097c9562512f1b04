"""Rehearsals: what `check` passes ends, what it refuses hangs or lacks data, and planned faults have their names.

Each test starts ranks without torch. What is not slow takes 20 s in all on two cores.
"""

import json
import sys

import pytest

from rlhf_spmd.__main__ import main
from tests.e2e.test_world_failures import PREFIX, run
from tests.run_mpi import REPOSITORY, environment_alone, run_limited

LIMIT_S, ROOT = 120.0, str(REPOSITORY)
TINY = ["--preset", "qwen2.5-0.5b", "--calibration", "a100-80g", "--iterations", "1"]
SMALL = ["--preset", "llama-7b", "--calibration", "a100-80g", "--iterations", "1"]
NUM_RANDOM, NUM_PLANTED = 100, 20
REHEARSED = """
import random
from rlhf_spmd.plan.cost.simulate import Times
from rlhf_spmd.runtime.world.trace import Tracer
from rlhf_spmd.runtime.rehearse.rehearsal import Faults, Rehearsal, Rehearsed, expanded
from tests import programs

def rehearse(program):
    times = Times(lambda rank, run: 0.0)
    rehearsal = Rehearsal(expanded(program), world, Tracer(world.rank), times, 1.0, Faults())
    for number in range(2):
        rehearsal.iteration(Rehearsed(number))
"""
RANDOM = """
def plan(choose):
    while True:
        try:
            workload, _, _ = programs.random_split_plan(choose)
            cluster = programs.Cluster.parse(choose([f"1x{world.size}", f"2x{world.size // 2}"]))
            return workload, programs.random_split_placement(choose, workload, cluster), cluster
        except programs.UserError:
            continue

ended = 0
for seed in range(FIRST, LAST):
    program = programs.random_split_program(random.Random(seed).choice, plan)
    if not programs.errors(program):
        rehearse(program)
        ended += 1
if world.rank == 0:
    print("ended", ended)
"""
PLANTED = """
rng = random.Random(SEED)
while True:
    broken = programs.mutated(rng.choice([programs.halves, programs.separation])(), rng)
    if programs.errors(broken):
        break
rehearse(broken)
"""


def command(words: list[str], limit_s: float = LIMIT_S) -> tuple[int | None, str, str]:
    program = [sys.executable, "-m", "rlhf_spmd", "rehearse", *words]
    return run_limited(program, limit_s=limit_s, environment=environment_alone())


@pytest.mark.parametrize("layout", ["2x4", pytest.param("8x8", marks=pytest.mark.slow)])
def test_a_job_of_many_ranks(layout, tmp_path):
    """One command starts the ranks; rows arrive before they are read, and the records are those of a run."""
    words = ["reallocation", "--layout", layout, *SMALL, "--seconds", "1", "--out", str(tmp_path / "out")]
    status, out, err = command(words, limit_s=5 * LIMIT_S)
    assert status == 0, err
    *text, last = out.splitlines()
    result = json.loads(last)
    assert result["ok"] and len(result["rehearsed_s"]) == 1
    # a rank may be late, as this machine is busy, but none is early
    assert result["rehearsed_s"][0] > 0.99 * result["forecast_s"] and result["processor_share"] > 0
    assert result["bytes_within_nodes"] > result["bytes_between_nodes"] >= 0
    assert "No rank hung, and every row was there when it was read." in text
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"timeline.json", "timeline.png"}


@pytest.mark.slow
def test_two_types_of_devices(tmp_path):
    """Without a calibration: those that are shipped are joined."""
    types = "".join(f'[[nodes]]\ndevices = 4\ndevice = "{one}"\n' for one in ("a100-80g", "h100-80g"))
    (tmp_path / "mixed.toml").write_text(types, encoding="utf-8")
    words = ["--cluster", str(tmp_path / "mixed.toml"), "--preset", "qwen2.5-7b", "--iterations", "1", "--seconds", "1"]
    status, out, err = command(["heterogeneous", *words, "strategy.zero=3"])
    assert status == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["ok"] and result["rehearsed_s"][0] > 0.99 * result["forecast_s"]


@pytest.mark.parametrize(
    "own",
    [pytest.param([], marks=pytest.mark.slow), ["--algorithm", "grpo", "grpo.rounds=3", "grpo.drop_equal_groups=true"]],
)
def test_one_iteration_ahead(own, tmp_path):
    """A first batch, steps, and a last batch; stages are rehearsed in their batch, and training beside drawing, of all
    rounds."""
    more = ["--seconds", "1", "--out", str(tmp_path / "out"), "strategy.ahead=1", "strategy.training_pp=2", *own]
    status, out, err = command(["separation", "--layout", "2x2", *TINY[:-1], "2", *more])
    assert status == 0, err
    *text, last = out.splitlines()
    result = json.loads(last)
    assert len(result["rehearsed_s"]) == 2 and min(result["rehearsed_s"]) > 0.99 * result["forecast_s"]
    assert result["bytes_between_nodes"] > 0
    assert "A first batch was sampled before, and a last one, 3, trained after these." in text
    assert "No rank hung, and every row was there when it was read." in text


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (["--kill", "1@actor_train"], ["rank 1 of 4", "SIGKILL", "Run actor_train epoch 0 mini-batch 0"]),
        (["--drop", "scores to"], ["no rank has been active", "rank 0 last reported: iteration 1: Wait", "(scores to"]),
    ],
)
def test_faults_have_the_names_of_a_real_job(fault, words, tmp_path, capsys):
    more = ["--seconds", "1", "--deadline", "3", "--out", str(tmp_path / "out"), *fault]
    status, _, err = command(["separation", "--layout", "2x2", *TINY, *more])
    assert status not in (None, 0) and err.count(PREFIX) == 1
    assert all(word in err for word in words), err
    assert main(["postmortem", str(tmp_path / "out")]) == 0 and words[-1] in capsys.readouterr().out


def test_random_programs_end():
    status, out, err = run(
        8, REHEARSED + RANDOM.replace("FIRST", "0").replace("LAST", "6"), deadline_s=30, PYTHONPATH=ROOT
    )
    assert status == 0, err
    assert int(out.split()[-1]) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [8, 12, 16])
def test_many_random_programs_end(num_ranks):
    """What `check` passes, ends: a program that does not would be a mistake of the proof."""
    body = REHEARSED + RANDOM.replace("FIRST", "0").replace("LAST", str(NUM_RANDOM))
    status, out, err = run(num_ranks, body, deadline_s=60, limit_s=1200, PYTHONPATH=ROOT)
    assert status == 0, err
    assert int(out.split()[-1]) >= NUM_RANDOM / 3


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, NUM_PLANTED))])
def test_what_check_refuses_does_not_end(seed):
    """It hangs, or a rank reads rows that it does not have."""
    status, _, err = run(4, REHEARSED + PLANTED.replace("SEED", str(seed)), deadline_s=3, PYTHONPATH=ROOT)
    assert status not in (None, 0)
    assert err.count(PREFIX) == 1, err
