"""What a user has in a shell on a cluster: scripts to submit, run folders and logs to look at."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.run_mpi import REPOSITORY
from tests.slurm.cluster import INTERFACE, Cluster, wait_until

NUM_ITERATIONS = 6
OPTIONS = ("--strategy", "separation", f"iterations={NUM_ITERATIONS}", "rollout_batch=64")
TWO_NODES = ("--nodes=2", "--ntasks-per-node=2", "--exclusive")
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
LIMIT_S = 120.0
SETTLE_S = 10  # as Slurm's two minutes before a restart: what is late of the old part can't end the new one


@dataclass(frozen=True, slots=True)
class Site:
    """A cluster, and a folder that all its nodes see."""

    cluster: Cluster
    folder: Path

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def environment(self) -> dict[str, str]:
        """The settings of the site."""
        return {
            "RLHF_SPMD_VENV": sys.prefix,
            "RLHF_SPMD_RUNS": str(self.runs),
            "RLHF_SPMD_INTERFACE": INTERFACE,
            "OMP_NUM_THREADS": "1",
        }

    def submit(self, script: str, *words: str, options: tuple[str, ...] = (), **environment: str) -> int:
        """Submits slurm/SCRIPT; returns the number of the job."""
        log = f"--output={self.folder}/%j.log"
        command = ["sbatch", "--parsable", log, *options, f"slurm/{script}", *words]
        return int(self.cluster.command(*command, folder=REPOSITORY, **self.environment, **environment))

    def run(self, script: str, *words: str) -> str:
        """Runs slurm/SCRIPT, which submits jobs; returns what it prints."""
        return self.cluster.command(f"slurm/{script}", *words, folder=REPOSITORY, **self.environment)

    def soon(self, job: int) -> None:
        """Lets a requeued job start soon, where Slurm would leave it in the queue for two minutes."""
        self.cluster.wait_for(job, "PENDING", "RUNNING", limit_s=LIMIT_S)
        self.cluster.command("scontrol", "update", f"JobId={job}", f"StartTime=now+{SETTLE_S}", check=False)

    def log(self, job: int) -> str:
        """Returns what a job has printed so far."""
        path = self.folder / f"{job}.log"
        return path.read_text(errors="replace", encoding="utf-8") if path.exists() else ""

    def metrics(self, run: str) -> list[dict]:
        """Returns the rows of metrics.jsonl, as far as they are written."""
        path = self.runs / run / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def checkpoints(self, run: str) -> list[str]:
        """Returns the whole checkpoints of a run, the newest last."""
        return sorted(path.parent.name for path in (self.runs / run).glob("checkpoints/iteration-*/manifest.json"))

    def ranks(self) -> list[int]:
        """Returns the processes of the program on all nodes."""
        return [pid for node in self.cluster.names for pid in self.cluster.ranks(node)]

    def after(self, job: int, num_rows: int) -> None:
        """Waits until the run of a job has so many rows of metrics."""
        wait_until(lambda: len(self.metrics(f"job-{job}")) >= num_rows, LIMIT_S, f"job {job} has {num_rows} iterations")

    def ends_well(self, job: int) -> dict[str, str]:
        """Waits for the end of a job; returns the fields of `scontrol show job`."""
        fields = self.cluster.wait_for(job, *ENDED, limit_s=LIMIT_S)
        assert (fields["JobState"], fields["ExitCode"]) == ("COMPLETED", "0:0"), self.log(job)
        return fields


def numbers(rows: list[dict]) -> list[dict]:
    """Returns the metrics without times, which must depend neither on the launcher nor on interruptions."""
    return [{name: value for name, value in row.items() if not name.endswith("_s")} for row in rows]
