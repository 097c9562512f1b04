"""Arrays of benches and of seeds, jobs from another folder, and the tests of a site.

make test-slurm
"""

import json
import re

from bench.rows import read_rows
from tests.run_mpi import REPOSITORY
from tests.slurm.cluster import wait_until
from tests.slurm.site import ENDED

LIMIT_S = 120.0


def test_an_array_of_benches(site):
    benches = ("scan --help", "plan-speed --help", "nonsense")
    number = site.submit("bench.sbatch", *benches, options=("--array=0-3", f"--output={site.folder}/bench-%a.log"))
    codes, said = (
        ["0:0", "0:0", "2:0", "2:0"],
        ["usage: bench scan", "usage: bench plan-speed", "python -m bench scan", "there are 3 benches"],
    )
    for index, (code, text) in enumerate(zip(codes, said, strict=True)):
        job = f"{number}_{index}"
        wait_until(lambda job=job: site.cluster.job(job)["JobState"] in ("COMPLETED", "FAILED"), LIMIT_S, f"{job} ends")
        log = (site.folder / f"bench-{index}.log").read_text(encoding="utf-8")
        assert site.cluster.job(job)["ExitCode"] == code and text in log, log


def test_the_matrix_of_the_papers_is_measured(site):
    """On the ranks of one node and of two; a cell that cannot be placed is a row, and a second submission measures
    nothing twice."""
    folder = site.folder / "measured"
    folder.mkdir()
    words = ("--preset", "llama-15m", "--strategy", "flattening", "heterogeneous", "--iterations", "1", "--warmup", "1")
    sizes = ("rollout_batch=4", "mini_batch=4", "micro_batch=2", "data.max_prompt=8", "generation.max_new_tokens=4")
    rows: dict[str, list[dict]] = {}
    for _ in range(2):
        script = (str(REPOSITORY / "slurm" / "measure.sh"), "1x2", "2x1", ":", *words, *sizes, "dtype=float32")
        jobs = re.findall(r"job (\d+)", site.cluster.command(*script, folder=folder, **site.environment))
        for layout, job in zip(("1x2", "2x1"), jobs, strict=True):
            wait_until(lambda job=job: site.cluster.job(f"{job}_0")["JobState"] in ENDED, 2 * LIMIT_S, f"{job} ends")
            assert site.cluster.job(f"{job}_0")["ExitCode"] == "0:0", list(folder.glob("*.log"))
            found = read_rows(site.runs / "measure" / f"{layout}.jsonl")
            assert rows.setdefault(layout, found) == found
    for good, refused in rows.values():
        assert good["samples_per_s"] > 0 and good["calls"]["actor_train"]["measured_s"] > 0 and not good["why_not"]
        assert refused["iteration_s"] is None and "heterogeneous" in refused["why_not"]


def test_the_tests_of_a_site(site):
    job = site.submit("test.sbatch", "tests/mpi/test_world.py", options=("--nodes=2", "--ntasks-per-node=2"))
    fields = site.cluster.wait_for(job, "COMPLETED", "FAILED", limit_s=LIMIT_S)
    assert fields["JobState"] == "COMPLETED" and " passed, 0 failed" in site.log(job), site.log(job)


def test_an_array_of_seeds_from_another_folder(site):
    """With the settings of the site in a file of the user's; the two runs draw different tokens."""
    elsewhere = site.folder / "elsewhere"
    elsewhere.mkdir()
    lines = [f"{name}={value}" for name, value in site.environment.items() if name.startswith("RLHF")]
    (elsewhere / "site.sh").write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = '--array=3-4 --nodes=1 --ntasks-per-node=2 "$RLHF_SPMD_SLURM/train.sbatch" iterations=2 rollout_batch=64'
    script = f". {REPOSITORY}/slurm/env.sh && sbatch --parsable {words}"
    number = site.cluster.command(
        "bash", "-c", script, folder=elsewhere, RLHF_SPMD_SITE=str(elsewhere / "site.sh"), OMP_NUM_THREADS="1"
    ).strip()
    hashes = set()
    for seed in (3, 4):
        job = f"{number}_{seed}"
        wait_until(lambda job=job: site.cluster.job(job)["JobState"] in ("COMPLETED", "FAILED"), LIMIT_S, f"{job} ends")
        assert site.cluster.job(job)["ExitCode"] == "0:0", list(elsewhere.glob("*.log"))
        run = f"job-{number}-seed-{seed}"
        assert json.loads((site.runs / run / "config.json").read_text(encoding="utf-8"))["seed"] == seed
        hashes |= {row["tokens_sha256"] for row in site.metrics(run)}
    assert len(hashes) == 4
