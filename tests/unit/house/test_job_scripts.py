"""The job scripts, as far as they can be read without Slurm (tests/slurm has the rest)."""

import json
import signal
import subprocess
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "slurm"
SCRIPTS = {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.iterdir())}


def sourced(**environment):
    script = ". slurm/env.sh; echo $RLHF_SPMD_VENV $RLHF_SPMD_LAUNCHER; env -0 | grep -zE '^(SBATCH|RLHF)_' | sort -z"
    done = subprocess.run(
        ["bash", "-euc", script], cwd=FOLDER.parent, env={"PATH": "/usr/bin:/bin", **environment}, capture_output=True
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    first, _, rest = done.stdout.decode().partition("\n")
    return first.split(), dict(entry.split("=", 1) for entry in rest.split("\0") if entry)


def test_a_file_of_the_user_has_the_settings_of_the_site(tmp_path):
    """Variables that are set, exported or not, take precedence over it."""
    (tmp_path / "rlhf_spmd").mkdir()
    lines = "SBATCH_PARTITION=gpu", "RLHF_SPMD_LAUNCHER=mpirun", "RLHF_SPMD_CONTAINER='apptainer exec --nv a.sif'"
    (tmp_path / "rlhf_spmd" / "site.sh").write_text("\n".join(lines) + "\n", encoding="utf-8")
    first, exported = sourced(XDG_CONFIG_HOME=str(tmp_path))
    assert first[1] == "mpirun" and exported["SBATCH_PARTITION"] == "gpu"
    assert exported["RLHF_SPMD_CONTAINER"] == "apptainer exec --nv a.sif"
    first, exported = sourced(XDG_CONFIG_HOME=str(tmp_path), RLHF_SPMD_LAUNCHER="srun")
    assert first[1] == "srun" and exported["SBATCH_PARTITION"] == "gpu"
    other = tmp_path / "other.sh"
    other.write_text("SBATCH_ACCOUNT='a b'\n", encoding="utf-8")
    first, exported = sourced(XDG_CONFIG_HOME=str(tmp_path), RLHF_SPMD_SITE=str(other))
    assert first[1] == "srun" and exported["SBATCH_ACCOUNT"] == "a b" and "SBATCH_PARTITION" not in exported


# ---- train.sbatch with a launcher and a Slurm that only write down what they are told ------------------------------

SRUN = """#!/bin/bash
printf '%s\\n' "$@" > $HERE/words
trap 'echo warned > $HERE/warned' USR1
touch $HERE/started
until [[ -e $HERE/stop ]]; do sleep 0.05; done
"""
SCONTROL = """#!/bin/bash
[[ $1 == requeue ]] && { echo requeue > $HERE/requeued; touch $HERE/stop; exit 1; }
echo "JobState=RUNNING PreemptTime=None EndTime=$(<$HERE/end)"
"""


class Job:
    """The script, running."""

    def __init__(self, folder: Path, *words: str, restart: int = 0, run: str = "", left_s=3600, **environment: str):
        self.folder, self.runs = folder, folder / "runs"
        (folder / "slurm").mkdir(exist_ok=True)
        for name, text in SCRIPTS.items():
            (folder / "slurm" / name).write_text(text, encoding="utf-8")
        end = datetime.now() + timedelta(seconds=left_s)
        (folder / "end").write_text(end.isoformat(timespec="seconds"), encoding="utf-8")
        (folder / "venv" / "bin").mkdir(parents=True, exist_ok=True)
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "python": "#!/bin/bash\n"}.items():
            (folder / "venv" / "bin" / name).write_text(text, encoding="utf-8")
            (folder / "venv" / "bin" / name).chmod(0o755)
        self.runs.mkdir(exist_ok=True)
        of_slurm = {"SLURM_SUBMIT_DIR": folder, "SLURM_JOB_ID": 7, "SLURM_RESTART_COUNT": restart, "SLURM_NTASKS": 2}
        ours = {"RLHF_SPMD_VENV": folder / "venv", "RLHF_SPMD_RUNS": self.runs, "HERE": folder} | of_slurm
        ours |= ({"RLHF_SPMD_RUN": run} if run else {}) | environment
        self.process = subprocess.Popen(
            ["bash", folder / "slurm" / "train.sbatch", *words],
            env={"PATH": "/usr/bin:/bin", **{name: str(value) for name, value in ours.items()}},
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        wait_for(folder / "started")
        (folder / "started").unlink()

    def checkpoint(self, iteration: int, run: str = "job-7") -> None:
        path = self.runs / run / "checkpoints" / f"iteration-{iteration:06d}" / "manifest.json"
        path.parent.mkdir(parents=True)
        (self.runs / run / "config.json").write_text(json.dumps({}), encoding="utf-8")
        path.touch()

    def end(self) -> tuple[list[str], str]:
        """Ends a job. Returns the words that the launcher got after `train`, and what the script said."""
        (self.folder / "stop").touch()
        said, _ = self.process.communicate(timeout=30)
        (self.folder / "stop").unlink()
        words = (self.folder / "words").read_text(encoding="utf-8").split("\n")[:-1]
        return words[words.index("train") + 1 :], said


def wait_for(path: Path) -> None:
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.02)


def test_a_job_from_another_folder_finds_the_scripts(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    places = {"SLURM_SUBMIT_DIR": str(tmp_path / "elsewhere"), "RLHF_SPMD_SLURM": str(tmp_path / "slurm")}
    assert Job(tmp_path, "--preset", "tiny", **places).end()[0][-2:] == ["--preset", "tiny"]


def test_the_tasks_of_an_array_differ_in_seed_and_folder(tmp_path):
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}
    words = Job(tmp_path, "--preset", "tiny", **array).end()[0]
    assert words == ["--runs", str(tmp_path / "runs"), "--name", "job-5-seed-3", "seed=3", "--preset", "tiny"]
    job = Job(tmp_path, "--preset", "tiny", restart=1, **array)
    job.checkpoint(10, run="job-5-seed-3")
    job.end()
    again = Job(tmp_path, "--preset", "tiny", restart=1, **array).end()[0]
    assert again == ["--resume", str(tmp_path / "runs/job-5-seed-3")]


def test_a_container_comes_before_python(tmp_path):
    job = Job(tmp_path, RLHF_SPMD_CONTAINER="apptainer exec --nv a.sif")
    job.end()
    words = (tmp_path / "words").read_text(encoding="utf-8").split("\n")
    assert words[words.index("apptainer") :][:6] == [
        "apptainer",
        "exec",
        "--nv",
        "a.sif",
        "env",
        "--ignore-signal=USR1",
    ]


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


def test_near_its_end_a_job_waits_for_a_checkpoint_while_there_is_time(tmp_path):
    before = Job(tmp_path)
    before.checkpoint(10)
    before.end()
    job = Job(tmp_path, restart=1, left_s=31)  # of which 30 are kept for the requeue
    job.process.send_signal(signal.SIGUSR1)
    wait_for(tmp_path / "warned")
    began = time.monotonic()
    assert "has written no checkpoint" in job.process.stdout.readline()
    assert time.monotonic() - began < 60, "it waited longer than the job lasts"
    job.end()
    job = Job(tmp_path, restart=2)
    (tmp_path / "warned").unlink()
    job.process.send_signal(signal.SIGUSR1)
    wait_for(tmp_path / "warned")
    job.checkpoint(20)
    wait_for(tmp_path / "requeued")
    assert "its time limit is near" in job.end()[1]


# ---- stages.sh with a queue that only writes down what it is told ---------------------------------------------------

SBATCH = """#!/bin/bash
printf '%s\\n' "$RLHF_SPMD_RUN" "$@" > $HERE/submitted-$(cat $HERE/next)
echo "$(($(cat $HERE/next)));a-cluster"
echo $(($(cat $HERE/next) + 1)) > $HERE/next
"""
SQUEUE = """#!/bin/bash
cat $HERE/queue-${3#--name=} 2>/dev/null || true
"""
SECTIONS = {"sft": ("--preset", "tiny", "iterations=4"), "reward": ("iterations=3",), "ppo": ("iterations=2", "a=b c")}
CHAIN = ("-N", "2", *(word for words in SECTIONS.values() for word in (":", *words)))


@pytest.fixture
def stages(tmp_path):
    """Runs the script: the words of every submission by its run folder's name, and what the script said."""
    for name, text in {"sbatch": SBATCH, "squeue": SQUEUE}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)

    def submit(*words, name="x", status=0):
        (tmp_path / "next").write_text("11", encoding="utf-8")
        for path in tmp_path.glob("submitted-*"):
            path.unlink()
        told = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HERE": str(tmp_path), "RLHF_SPMD_RUNS": str(tmp_path / "runs")}
        command = [FOLDER / "stages.sh", name, *words]
        done = subprocess.run(command, cwd=FOLDER.parent, env=told, capture_output=True, encoding="utf-8")
        assert done.returncode == status, done.stderr
        found = [path.read_text(encoding="utf-8").split("\n")[:-1] for path in sorted(tmp_path.glob("submitted-*"))]
        return {run: words for run, *words in found}, done.stdout + done.stderr

    return submit


def of_train(submitted):
    return submitted[submitted.index(str(FOLDER / "train.sbatch")) + 1 :]


def test_stages_wait_for_each_other_and_read_what_the_others_write(stages, tmp_path):
    found, said = stages(*CHAIN)
    runs = tmp_path / "runs"
    assert list(found) == ["x-sft", "x-reward", "x-ppo"]
    assert of_train(found["x-sft"]) == ["--algorithm", "sft", *SECTIONS["sft"]]
    model = ["--model", f"{runs}/x-sft/actor"]
    assert of_train(found["x-reward"]) == ["--algorithm", "reward_model", *model, *SECTIONS["reward"]]
    assert of_train(found["x-ppo"]) == [*model, f"models.reward={runs}/x-reward/reward", *SECTIONS["ppo"]]
    waits = {run: [word for word in words if "depend" in word] for run, words in found.items()}
    assert waits == {"x-sft": [], "x-reward": ["--dependency=afterok:11"], "x-ppo": ["--dependency=afterok:11:12"]}
    assert ["--kill-on-invalid-dep=yes" in words for words in found.values()] == [False, True, True]
    assert all(words[:2] == ["-N", "2"] and f"--job-name={run}" in words for run, words in found.items())
    assert "x-ppo: job 13 after 11:12" in said


def test_a_job_measures_each_layout(tmp_path):
    """Submitted by a Slurm that runs the script at once, whose batch step starts the bench without ranks."""
    (tmp_path / "slurm").mkdir()
    for name, text in SCRIPTS.items():
        (tmp_path / "slurm" / name).write_text(text, encoding="utf-8")
    programs = {
        "sbatch": 'echo "$@" | tr " " "\\n" >>"$HERE/sbatch"; SLURM_SUBMIT_DIR=$HERE bash "${@: -2:1}" "${@: -1}"',
        "python": 'echo "$@" >>"$HERE/python"',
    }
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    for name, text in programs.items():
        path = tmp_path / "venv" / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        path.chmod(0o755)
    environment = {"PATH": f"{tmp_path}/venv/bin:/usr/bin:/bin", "HERE": str(tmp_path), "SLURM_NTASKS": "16"}
    environment |= {"RLHF_SPMD_VENV": str(tmp_path / "venv"), "RLHF_SPMD_RUNS": "/runs"}
    command = ["bash", tmp_path / "slurm" / "measure.sh", "2x8", "4x8", ":", "--preset", "llama-7b"]
    assert subprocess.run(command, env=environment, cwd=tmp_path, check=False).returncode == 0
    submitted = (tmp_path / "sbatch").read_text(encoding="utf-8").splitlines()
    assert {"-N", "2", "4", "--ntasks-per-node=8", "--array=0", "--job-name=measure-4x8"} <= set(submitted)
    started = (tmp_path / "python").read_text(encoding="utf-8").splitlines()
    words = "-m bench measure --layout 2x8 --out /runs/measure/2x8.jsonl --preset llama-7b"
    assert started[0] == f"{words} --launcher srun --mpi=pmi2 --kill-on-bad-exit=1" and len(started) == 2
    refused = subprocess.run([*command[:2], "8"], env=environment, capture_output=True, encoding="utf-8", check=False)
    assert refused.returncode == 2 and "NODESxDEVICES" in refused.stderr
