"""Three dependent jobs, as slurm/stages.sh submits them, go on after a preemption of each, and after one of them fails.

make test-slurm
"""

import json
import re

import pytest

from tests.folders import WORDS, write_model
from tests.slurm.cluster import wait_until
from tests.slurm.site import LIMIT_S

STAGES = {"sft": "actor", "reward": "reward", "ppo": "actor"}  # stage -> its model
ITERATIONS = {"sft": 40, "reward": 40, "ppo": 12}
NODES = ("--nodes=2", "--ntasks-per-node=1", "--exclusive")
SIZES = ("data.max_prompt=8", "generation.max_new_tokens=16", "rollout_batch=128", "mini_batch=16", "num_samples=0")


@pytest.fixture(scope="module")
def chain(site):
    """Submits the chain of a name -> the numbers of its new jobs by stage, and what the script said."""
    folder, rows = site.folder / "stages", []
    for index in range(48):
        some = [WORDS[(7 * index + 3 * place) % 60] for place in range(20)]
        row = {"prompt": some[: 1 + index % 5], "completion": some[3 : 5 + index % 9]}
        row |= {"chosen": some[2 : 4 + index % 7], "rejected": some[5 : 7 + index % 8]}
        rows.append({name: " ".join(some) for name, some in row.items()})
    write_model(folder / "base", seed=1)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def submit(name: str, data=folder / "rows.jsonl"):
        words = ["--model", str(folder / "base")]
        for number in ITERATIONS.values():
            words += [f"data.prompts={data}", f"iterations={number}", *SIZES, ":"]
        said = site.run("stages.sh", name, f"--output={site.folder}/%j.log", *NODES, ":", *words[:-1])
        return {stage: int(job) for stage, job in re.findall(rf"^{name}-(\w+): job (\d+)\b(?! is)", said, re.M)}, said

    return submit


def models(site, name) -> dict[str, bytes]:
    """Returns what the stages have written."""
    runs = {stage: site.runs / f"{name}-{stage}" / role for stage, role in STAGES.items()}
    return {stage: (folder / "model.safetensors").read_bytes() for stage, folder in runs.items()}


@pytest.fixture(scope="module")
def undisturbed(site, chain):
    """Returns the models of a chain that nothing disturbs."""
    jobs, _ = chain("alone")
    assert list(jobs) == list(STAGES)
    for job in jobs.values():
        assert site.ends_well(job)["Restarts"] == "0"
    found = models(site, "alone")
    assert len(set(found.values())) == len(STAGES)
    return found


def preempt(site) -> None:
    """Submits a job of more urgency that takes all nodes and ends at once."""
    about = ("--partition=urgent", "--output=/dev/null", *NODES)
    job = site.cluster.command("sbatch", "--parsable", *about, "--wrap=true", folder=site.folder).strip()
    site.cluster.wait_for(job, "COMPLETED", limit_s=LIMIT_S)


def test_a_chain_survives_a_preemption_of_each_job(site, chain, undisturbed):
    jobs, _ = chain("disturbed")
    for stage, job in jobs.items():
        run = f"disturbed-{stage}"
        wait_until(lambda run=run: len(site.metrics(run)) >= 2, LIMIT_S, f"{run} has two iterations")
        again, said = chain("disturbed")
        assert not again and f"{run}: job {job} is in the queue" in said
        preempt(site)
        wait_until(lambda job=job: site.cluster.job(job)["Restarts"] == "1", LIMIT_S, f"job {job} is requeued")
        assert 2 <= len(site.metrics(run)) < ITERATIONS[stage] and site.checkpoints(run)
        after = [other for other in jobs.values() if other > job]  # which wait on: a requeued job has not ended
        assert [site.cluster.job(other)["JobState"] for other in after] == ["PENDING"] * len(after)
        site.soon(job)
        fields = site.ends_well(job)
        assert fields["Restarts"] == "1" and "because it is preempted" in site.log(job)
    assert models(site, "disturbed") == undisturbed
    again, said = chain("disturbed")
    assert not again and said.count("finished") == len(STAGES)


def test_a_chain_goes_on_after_a_stage_has_failed(site, chain, undisturbed):
    """The jobs that wait for it are cancelled; the same command submits what is missing."""
    data = site.folder / "stages" / "late.jsonl"
    jobs, _ = chain("late", data)
    fields = {stage: site.cluster.wait_for(job, "FAILED", "CANCELLED", limit_s=LIMIT_S) for stage, job in jobs.items()}
    assert [one["JobState"] for one in fields.values()] == ["FAILED", "CANCELLED", "CANCELLED"]
    assert "late.jsonl" in site.log(jobs["sft"])
    data.write_bytes((site.folder / "stages" / "rows.jsonl").read_bytes())
    jobs, _ = chain("late", data)
    wait_until(lambda: site.metrics("late-reward"), LIMIT_S, "the reward model trains")
    site.cluster.command("scancel", str(jobs["reward"]))
    site.cluster.wait_for(jobs["ppo"], "CANCELLED", limit_s=LIMIT_S)
    wait_until(lambda: site.ranks() == [], LIMIT_S, "all ranks have ended")
    more, said = chain("late", data)
    assert list(more) == ["reward", "ppo"] and "late-sft: finished" in said
    for job in more.values():
        site.ends_well(job)
    assert models(site, "late") == undisturbed
