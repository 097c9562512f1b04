"""Arrays of benches, and the tests of a site.

make test-slurm
"""

from tests.slurm.cluster import wait_until

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


def test_the_tests_of_a_site(site):
    job = site.submit("test.sbatch", "tests/mpi/test_world.py", options=("--nodes=2", "--ntasks-per-node=2"))
    fields = site.cluster.wait_for(job, "COMPLETED", "FAILED", limit_s=LIMIT_S)
    assert fields["JobState"] == "COMPLETED" and " passed, 0 failed" in site.log(job), site.log(job)
