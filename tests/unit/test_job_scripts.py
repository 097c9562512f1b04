"""The job scripts, as far as they can be read without Slurm (tests/slurm has the rest)."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from bench.forecast.suites import SUITES

FOLDER = Path(__file__).parents[2] / "slurm"
SCRIPTS = {path.name: path.read_text() for path in sorted(FOLDER.iterdir())}
SITE_OPTIONS = (
    "--partition",
    "--account",
    "--qos",
    "--constraint",
    "--gres",
    "--gpus",
    "--nodelist",
    "--time",
    "--mail",
)
OF_A_JOB = {"RLHF_SPMD_RUN"}  # given with one job, documented in its script


def code(name):
    return [line for line in SCRIPTS[name].splitlines() if line.startswith("#SBATCH") or not line.startswith("#")]


def test_only_env_knows_the_site():
    assert {"env.sh", "launch.sh", "train.sbatch", "bench.sbatch", "test.sbatch"} == set(SCRIPTS)
    known = set(re.findall(r"^: .*", SCRIPTS["env.sh"], re.MULTILINE))
    variables = set(re.findall(r"\w+(?=:=)", " ".join(known)))
    assert {"RLHF_SPMD_LAUNCHER", "RLHF_SPMD_VENV", "SBATCH_PARTITION"} <= variables
    for name in SCRIPTS:
        text = "\n".join(code(name))
        assert set(re.findall(r"RLHF_SPMD_\w+", text)) <= variables | OF_A_JOB, name
        assert not [option for option in SITE_OPTIONS if option in text], name


def test_every_bench_of_the_array_exists():
    text = SCRIPTS["bench.sbatch"].replace("\\\n", "")
    named = re.search(r"for suite in ([^;]+);", text)[1].split()
    assert set(named) == set(SUITES) - {"all", "quick"}
    assert f"#SBATCH --array=0-{len(named)}\n" in text  # and `scan` itself


def sourced(**environment):
    script = ". slurm/env.sh; echo $RLHF_SPMD_VENV $RLHF_SPMD_LAUNCHER; env -0 | grep -zE '^(SBATCH|RLHF)_' | sort -z"
    done = subprocess.run(
        ["bash", "-euc", script], cwd=FOLDER.parent, env={"PATH": "/usr/bin:/bin", **environment}, capture_output=True
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    first, _, rest = done.stdout.decode().partition("\n")
    return first.split(), dict(entry.split("=", 1) for entry in rest.split("\0") if entry)


def test_env_has_defaults_and_keeps_what_is_set():
    first, exported = sourced()
    assert first == [f"{FOLDER.parent}/.venv", "srun"]
    assert not [name for name in exported if name.startswith("SBATCH_")]  # an empty partition is not the default one
    assert "RLHF_SPMD_INTERFACE" not in exported and exported["RLHF_SPMD_PMI"] == "pmi2"
    first, exported = sourced(RLHF_SPMD_LAUNCHER="mpirun", SBATCH_PARTITION="gpu", RLHF_SPMD_INTERFACE="ib0")
    assert first[1] == "mpirun" and exported["SBATCH_PARTITION"] == "gpu" and exported["RLHF_SPMD_INTERFACE"] == "ib0"


# ---- train.sbatch with a launcher and a Slurm that only write down what they are told ------------------------------

SRUN = """#!/bin/bash
printf '%s\\n' "$@" > $HERE/words
trap 'echo warned > $HERE/warned' USR1
touch $HERE/started
until [[ -e $HERE/stop ]]; do sleep 0.05; done
"""
SCONTROL = """#!/bin/bash
[[ $1 == requeue ]] && { echo requeue > $HERE/requeued; touch $HERE/stop; exit 1; }
echo "JobState=RUNNING PreemptTime=None"
"""


class Job:
    """The script, running."""

    def __init__(self, folder: Path, *words: str, restart: int = 0, run: str = ""):
        self.folder, self.runs = folder, folder / "runs"
        (folder / "slurm").mkdir(exist_ok=True)
        for name, text in SCRIPTS.items():
            (folder / "slurm" / name).write_text(text.replace("patience_s=90", "patience_s=1"))
        (folder / "venv" / "bin").mkdir(parents=True, exist_ok=True)
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "python": "#!/bin/bash\n"}.items():
            (folder / "venv" / "bin" / name).write_text(text)
            (folder / "venv" / "bin" / name).chmod(0o755)
        self.runs.mkdir(exist_ok=True)
        of_slurm = {"SLURM_SUBMIT_DIR": folder, "SLURM_JOB_ID": 7, "SLURM_RESTART_COUNT": restart, "SLURM_NTASKS": 2}
        ours = {"RLHF_SPMD_VENV": folder / "venv", "RLHF_SPMD_RUNS": self.runs, "HERE": folder} | of_slurm
        ours |= {"RLHF_SPMD_RUN": run} if run else {}
        self.process = subprocess.Popen(
            ["bash", folder / "slurm" / "train.sbatch", *words],
            env={"PATH": "/usr/bin:/bin", **{name: str(value) for name, value in ours.items()}},
            stdout=subprocess.PIPE,
            text=True,
        )
        wait_for(folder / "started")
        (folder / "started").unlink()

    def checkpoint(self, iteration: int, run: str = "job-7") -> None:
        path = self.runs / run / "checkpoints" / f"iteration-{iteration:06d}" / "manifest.json"
        path.parent.mkdir(parents=True)
        (self.runs / run / "config.json").write_text(json.dumps({}))
        path.touch()

    def end(self) -> tuple[list[str], str]:
        """-> the words that the launcher got behind `train`, and what the script said."""
        (self.folder / "stop").touch()
        said, _ = self.process.communicate(timeout=30)
        (self.folder / "stop").unlink()
        words = (self.folder / "words").read_text().split("\n")[:-1]
        return words[words.index("train") + 1 :], said


def wait_for(path: Path) -> None:
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.02)


def test_a_restart_repeats_its_words_where_an_old_run_goes_on(tmp_path):
    """A job that makes its run has all of it in the run folder; one that goes on with another's may be killed before it
    has written what is new there."""
    job = Job(tmp_path, "--preset", "tiny")
    job.checkpoint(10)
    assert job.end()[0] == ["--runs", str(tmp_path / "runs"), "--name", "job-7", "--preset", "tiny"]
    assert Job(tmp_path, "--preset", "tiny", restart=1).end()[0] == ["--resume", str(tmp_path / "runs/job-7")]
    for restart in (0, 1):
        words, _ = Job(tmp_path, "iterations=20", restart=restart, run="job-7").end()
        assert words == ["--resume", str(tmp_path / "runs/job-7"), "iterations=20"]


@pytest.mark.parametrize("earlier", [True, False], ids=["behind an earlier checkpoint", "without any"])
def test_an_iteration_longer_than_the_warning(tmp_path, earlier):
    """No checkpoint comes in time: the job goes on from one that this part of it wrote before, or says what to do."""
    job = Job(tmp_path)
    if earlier:
        job.checkpoint(10)
    os.kill(job.process.pid, signal.SIGUSR1)
    wait_for(tmp_path / "warned")
    if earlier:
        wait_for(tmp_path / "requeued")
    else:
        time.sleep(2.5)
    said = job.end()[1]
    assert (tmp_path / "requeued").exists() == earlier
    assert ("is requeued" if earlier else "has written no checkpoint: lower checkpoint.every") in said
