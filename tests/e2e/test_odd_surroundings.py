"""Ranks in surroundings that lack something: one message that names it, at once. 5 s; some need root's namespaces."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.folders import write_all
from tests.run_mpi import environment_alone, mpi_command, run_limited

LIMIT_S = 60.0
PREFIX = "rlhf_spmd: error: "
PROGRAM = """
from rlhf_spmd.runtime.world.world import World
world = World.discover()
try:
    world.use_device("cpu")
    world.start_torch({})
except BaseException as error:
    world.fail(error)
"""
RANKS = " ".join(mpi_command(2)) + f" {sys.executable} -c '{PROGRAM}'"


def refusal(shell: str, status: int | None = 2) -> str:
    """Returns the one message of a job that a shell starts."""
    found, _, err = run_limited(["bash", "-c", shell], limit_s=LIMIT_S, environment=environment_alone())
    assert (found == status or (status is None and found)) and err.count(PREFIX) == 1 and "Traceback" not in err, err
    return err.partition(PREFIX)[2]


def may_unshare(*options: str) -> bool:
    command = ["unshare", *options, "true"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


def test_no_thread_for_the_watch():
    """The ranks have met MPI, but not each other."""
    program = """
import threading
def start(thread): raise RuntimeError("Resource temporarily unavailable")
threading.Thread.start = start
"""
    text = refusal(f"{' '.join(mpi_command(2))} {sys.executable} -c '{program}{PROGRAM}'")
    assert "may not start another thread" in text and "(reported by rank 0 of 2)" in text


def test_too_few_open_files():
    assert refusal(f"ulimit -n 40; {RANKS}").startswith("the limit of open files on ")


@pytest.mark.skipif(not may_unshare("-n"), reason="needs a network namespace")
def test_no_loopback():
    text = refusal(f"unshare -n {RANKS}")
    assert "can't reach its own address 127.0.0.1 (Network is unreachable): bring the loopback interface up" in text


@pytest.mark.skipif(not may_unshare("-m") or mpi_command(1)[1] != "-n", reason="needs MPICH and a mount namespace")
def test_shared_memory_that_mpi_does_not_fit_into():
    train = f"{' '.join(mpi_command(2))} {sys.executable} -m rlhf_spmd train"
    text = refusal(f"unshare -m sh -c 'mount -t tmpfs -o size=1m tmpfs /dev/shm && {train}'", None)
    assert "most likely /dev/shm is too small: 1 MiB" in text and "--shm-size=1g" in text


def test_a_run_in_odd_surroundings(tmp_path):
    """Its output is a full disk, its threads are a list, and another launcher's variables are left."""
    words = [*write_all(tmp_path), "iterations=1", "num_samples=0", "--runs", str(tmp_path), "--name", "run"]
    odd = {"OMP_NUM_THREADS": "1,1", "SLURM_LOCALID": "3", "PMI_SIZE": "", "PMI_RANK": "x", "PMI_FD": "77"}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rlhf_spmd", "train", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            timeout=LIMIT_S,
            env=environment_alone(**odd),
            check=False,
        )
    note = "rlhf_spmd: note: standard output can't be written (No space left on device): the run goes on without it\n"
    assert (done.returncode, done.stderr) == (0, note)
    assert (tmp_path / "run" / "actor" / "model.safetensors").exists() and os.listdir(tmp_path / "run" / "checkpoints")


@pytest.mark.parametrize("more", [{}, {"PMI_SIZE": "4", "PMI_RANK": "0"}], ids=["srun", "srun --mpi=pmi2"])
def test_an_interactive_step_of_slurm(more):
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", **more}
    command = [sys.executable, "-m", "rlhf_spmd"]
    found, out, err = run_limited([*command, "algorithms"], limit_s=LIMIT_S, environment=environment_alone(**step))
    assert (found, err) == (0, "") and "ppo" in out
    if more:
        return
    found, out, err = run_limited([*command, "train"], limit_s=LIMIT_S, environment=environment_alone(**step))
    assert (found, out) == (2, "") and "as in a shell of `srun --pty`, start the ranks there with `mpirun -n 4`" in err
    step["SLURM_PROCID"] = "2"
    found, out, err = run_limited([*command, "algorithms"], limit_s=LIMIT_S, environment=environment_alone(**step))
    assert (found, out) == (0, "") and err == ("rlhf_spmd: note: algorithms runs in one process: copy 0 of 4 does it\n")
