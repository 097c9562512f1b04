"""The job scripts, as far as they can be read without Slurm (tests/slurm has the rest)."""

import re
import subprocess
from pathlib import Path

from bench.suites import SUITES

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
    text = SCRIPTS["bench.sbatch"]
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
