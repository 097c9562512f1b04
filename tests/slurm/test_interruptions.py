"""Runs that are interrupted go on by themselves, and end with the numbers of one that was not.

make test-slurm
"""

import os
import signal

import pytest

from tests.slurm.cluster import wait_until
from tests.slurm.site import ENDED, LIMIT_S, NUM_ITERATIONS, OPTIONS, TWO_NODES, numbers

DEAD_RANK_S = 30.0  # from its end to that of the job


def start(site, *words, **environment):
    """Returns a run on two nodes, some iterations old."""
    job = site.submit("train.sbatch", *OPTIONS, *words, options=TWO_NODES, **environment)
    site.after(job, 2)
    return job


def comes_back(site, job):
    """Waits until the job is back in the queue."""
    wait_until(lambda: int(site.cluster.job(job)["Restarts"]) == 1, LIMIT_S, f"job {job} is back in the queue")
    assert len(site.metrics(f"job-{job}")) < NUM_ITERATIONS, "the run was too fast to be interrupted"


def goes_on(site, job, undisturbed):
    """Lets the job start soon, where Slurm would leave it a while, and compares the end."""
    site.soon(job)
    fields = site.ends_well(job)
    assert int(fields["Restarts"]) == 1
    assert numbers(site.metrics(f"job-{job}")) == undisturbed[0]


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_a_preempted_job_goes_on(site, undisturbed, launcher):
    job = start(site, RLHF_SPMD_LAUNCHER=launcher)
    urgent = site.submit("bench.sbatch", "scan --help", options=("--partition=urgent", "--array=0", *TWO_NODES))
    comes_back(site, job)
    assert "because it is preempted" in site.log(job) and site.checkpoints(f"job-{job}")
    wait_until(lambda: site.cluster.job(f"{urgent}_0")["JobState"] in ENDED, LIMIT_S, "the urgent job ends")
    goes_on(site, job, undisturbed)


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_a_job_near_its_time_limit_goes_on(site, undisturbed, launcher):
    job = start(site, RLHF_SPMD_LAUNCHER=launcher)
    site.cluster.command("scancel", "--signal=USR1", "--batch", str(job))  # as --signal=B:USR1@120 does
    comes_back(site, job)
    assert "because its time limit is near" in site.log(job) and site.checkpoints(f"job-{job}")
    goes_on(site, job, undisturbed)


def test_a_lost_node_does_not_end_a_job(site, undisturbed):
    job = start(site, "checkpoint.every=1")
    site.cluster.crash("n2")
    try:
        comes_back(site, job)
        site.cluster.wait_for(job, "PENDING", limit_s=LIMIT_S)
        site.cluster.command("scontrol", "update", f"JobId={job}", "StartTime=now+60")
    finally:
        site.cluster.start("n2")
    site.cluster.wait_for_node("n2", "idle")
    assert "a node does not answer" in site.log(job)
    goes_on(site, job, undisturbed)


def test_a_dead_rank_ends_a_job_and_a_new_one_goes_on(site, undisturbed):
    job = start(site, "checkpoint.every=1")
    os.kill(site.cluster.ranks("n2")[-1], signal.SIGKILL)
    fields = site.cluster.wait_for(job, *ENDED, limit_s=DEAD_RANK_S)
    assert fields["JobState"] == "FAILED" and site.ranks() == []
    after = site.submit("train.sbatch", options=TWO_NODES, RLHF_SPMD_RUN=f"job-{job}")
    site.ends_well(after)
    assert numbers(site.metrics(f"job-{job}")) == undisturbed[0]


def test_a_cancelled_job_stays_so(site):
    job = start(site)
    site.cluster.command("scancel", str(job))
    fields = site.cluster.wait_for(job, *ENDED, limit_s=LIMIT_S)
    wait_until(lambda: site.ranks() == [], LIMIT_S, "all ranks have ended")
    assert fields["JobState"] == "CANCELLED" and fields["Restarts"] == "0"
    assert "does not answer" not in site.log(job)
