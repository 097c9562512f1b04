"""The embedded task with tools (`make demo-tools`): it learns, and its numbers depend neither on ranks nor on workers,
nor on a kill in the middle of a call."""

import functools
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.rows import TIMED as OF_A_RUN
from rlhf_spmd import embedded
from rlhf_spmd.__main__ import main
from tests import environments, warm
from tests.page_runs import evaluations, timeless
from tests.run_mpi import mpi_command, mpi_environment

WORDS = ("--preset", "tools", "num_samples=1")
SMALL = ("iterations=2", "rollout_batch=4", "mini_batch=16", "eval.num_prompts=8", "eval.every=2")
# What depends on seconds: so do the rows that are drawn together, and with them the last bits of the sampler's
# logprobs, which only the parity gate reads.
TIMED = (*OF_A_RUN, "parity_max_abs", "parity_mean_abs", "answers", "tool_s", "tool_p95_s")


OWN = Path(environments.__file__).with_name("of_tables.py")
# Three rows, whose float32 products have other bits than those of more.
THREE = ("rollout_batch=1", "samples_per_prompt=3", "mini_batch=3", "micro_batch=3", "iterations=3", "eval.every=3")
THREE += ("eval.num_prompts=4", "eval.at_start=false", "checkpoint.every=1", f"reward_function={OWN}:judge")
SLICES = ("--strategy", "flattening", "strategy.tp=2")


def command(ranks: int, *words) -> list[str]:
    return [*mpi_command(ranks), sys.executable, "-m", "rlhf_spmd", "train", *map(str, words)]


def trained(ranks: int, *words, limit_s: float = 120.0, **more: str) -> str:
    """Trains.

    more: of the surroundings.
    """
    status, stdout, stderr = warm.shared().run(["train", *words], ranks, limit_s=limit_s, **more)
    assert status == 0, stdout + stderr
    return stdout


def killed(ranks: int, place: str, run: Path, *words) -> None:
    """Begins a run, and kills a rank of its second iteration at a place (tests/environments/of_tables.py)."""
    words = (*WORDS, *THREE, "--runs", run.parent, "--name", run.name, *words)
    surroundings = mpi_environment(OMP_NUM_THREADS="1", DEADLY=str(run.parent))
    with subprocess.Popen(
        command(ranks, *words), env=surroundings, stderr=subprocess.PIPE, encoding="utf-8"
    ) as process:
        end = time.monotonic() + 300
        while not (run / "metrics.jsonl").exists():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.005)
        (run.parent / place).touch()
        assert process.communicate(timeout=300)[0] is None and process.returncode
    assert not (run.parent / place).exists(), "the place was not come to"
    assert len(rows(run)) < 3


def rows(run: Path) -> list[dict]:
    return timeless(run, TIMED)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    trained(2, *WORDS, *SMALL, "--runs", folder, "--name", "whole", "checkpoint.every=1", "rollouts.every=1")
    return folder / "whole"


def test_episodes_call_tools_and_are_counted(whole):
    found = rows(whole)
    assert len(found) == 2
    for row in found:
        assert 1.0 < row["tool_calls"] < 3.5 and 2.0 < row["turns"] < 4.5
        assert row["tool_timeouts"] == 0
        ends = sum(value for name, value in row.items() if name.startswith("end_"))
        assert ends == pytest.approx(1.0) and row["end_completed"] > 0.9
    texts = [path.read_text(encoding="utf-8") for path in (whole / "rollouts").rglob("*.jsonl")]
    samples = [json.loads(line) for text in texts for line in text.split("\n")[:-1]]
    first = next(row for row in samples if row["scores"] == 1)
    assert 0 < sum(first["drawn"]) < len(first["drawn"])  # what tools have answered is there, and was not drawn
    assert first["end"] == "completed" and [bool(turn["calls"]) for turn in first["turns"]][-2:] == [True, False]


def test_episodes_are_shown_by_turns(whole, capsys):
    """Of an iteration, and of the samples before and after training."""
    assert main(["rollouts", str(whole), "--where", "scores=1"]) == 0
    *lines, _, result = capsys.readouterr().out.rstrip().split("\n")
    assert max(map(len, lines)) <= 80 and json.loads(result)["matching"] > 0
    assert sum(line.startswith("  1 call   lookup") for line in lines) > 0 and "    ended: completed" in lines
    samples = [json.loads(line) for line in (whole / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all("ended: " in one[when] and " 1 " in one[when] for one in samples for when in ("before", "after"))
    assert main(["report", str(whole), "--out", str(whole / "report.html")]) == 0
    page = (whole / "report.html").read_text(encoding="utf-8")
    assert page.count('class="text turns"') == 2 * len(samples)
    shown = page.partition("<details>")[0]
    assert all(f">{name}<" in shown for name in ("turns", "tool_calls", "tool_failures", "reward"))


@pytest.mark.slow
def test_groups_that_fail_are_sampled_again(tmp_path):
    """In rounds, by one rank as by two with slices of the actor."""
    rounds = ("grpo.rounds=3", "grpo.drop_equal_groups=true", "rollouts.every=1", "eval.prompts=", "iterations=2")
    sizes = ("rollout_batch=4", "samples_per_prompt=4", "mini_batch=16", "--runs", tmp_path, "--name")
    for ranks, own in ((1, ()), (2, SLICES)):
        trained(ranks, *WORDS, *rounds, *sizes, f"on-{ranks}", *own, limit_s=300.0)
    whole, other = (rows(tmp_path / f"on-{ranks}") for ranks in (1, 2))
    names = ("tokens_sha256", "reward", "turns", "tool_calls", "failed_groups")
    assert [[row[name] for name in names] for row in whole] == [[row[name] for name in names] for row in other]
    assert max(row["failed_groups"] for row in whole) > 0
    texts = [path.read_text(encoding="utf-8") for path in (tmp_path / "on-1" / "rollouts").rglob("*.jsonl")]
    assert sum(text.count('"end": "completed"') for text in texts) == 32


# ---- weights, bit by bit ---------------------------------------------------------------------------------------------


def weights_of(run: Path) -> bytes:
    return (run / "actor" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def of_three(tmp_path_factory):
    """Returns of_three(ranks, *words): a run of three rows on so many ranks, whose tools answer at random times; made
    once."""
    folder = tmp_path_factory.mktemp("three")

    @functools.cache
    def made(ranks: int, *own: str) -> Path:
        name = "-".join(("on", str(ranks), *own)).replace("=", "-")
        words = ("--runs", folder, "--name", name, f"environment={OWN}:Sleepy", *own)
        trained(ranks, *WORDS, *THREE, *words, limit_s=400.0, DEADLY=str(folder))
        return folder / name

    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "own"),
    [
        ("before a call", ()),
        ("in a call", ()),
        ("after an answer", ()),
        ("in training", ()),
        ("in a call", SLICES),
        ("in training", SLICES),
    ],
)
def test_a_kill_at_any_place_leaves_the_same_bits(of_three, place, own):
    """A resumed run makes the calls of its iteration again."""
    whole = of_three(2, *own)
    run = whole.with_name(f"killed {place} {len(own)}")
    killed(2, place, run, f"environment={OWN}:Sleepy", *own)
    trained(2, "--resume", run, limit_s=400.0, DEADLY=str(run.parent))
    assert rows(run) == rows(whole)
    assert weights_of(run) == weights_of(whole)


@pytest.mark.slow
def test_environments_of_other_programs_get_the_same_tokens(tmp_path):
    """The one of the preset, in the form of TRL (by a factory that a column names), verl, SkyRL-Gym and OpenRLHF. At a
    low temperature, where no call is malformed, the model hears the same words from each."""
    prompts, found = tmp_path / "prompts.jsonl", {}
    with (
        embedded.path_of("tools/prompts.jsonl").open(encoding="utf-8") as file,
        prompts.open("w", encoding="utf-8") as out,
    ):
        for line in [next(file) for _ in range(64)]:
            row = json.loads(line)
            created = {name: {"create_kwargs": {"table": row["table"]}} for name in ("lookup", "calculate")}
            row |= {"environment": "table", "tools_kwargs": created}
            out.write(json.dumps(row) + "\n")
    elsewhere = OWN.with_name("tables_elsewhere.py")
    specs = ("rlhf_spmd.embedded.table_tools:Table", f"{elsewhere}:FACTORIES", str(elsewhere.with_suffix(".yaml")))
    specs += (f"{elsewhere}:OfSkyRL", f"{elsewhere}:OfOpenRLHF")
    more = (
        f"data.prompts={prompts}",
        "generation.temperature=0.05",
        "iterations=2",
        "eval.every=2",
        "eval.num_prompts=4",
    )
    for number, spec in enumerate(specs):
        words = ("--runs", tmp_path, "--name", f"run-{number}", f"environment={spec}", f"eval.prompts={prompts}")
        trained(1, *WORDS, *SMALL, *words, *more)
        found[spec] = rows(tmp_path / f"run-{number}")
    first, *others = found.values()
    for row in first:
        assert row["reward"] > 0.8 and row["tool_failures"] == 0
    for other in others:
        for row, of_first in zip(other, first, strict=True):
            same = ("tokens_sha256", "reward", "policy_loss", "actor_grad_norm", "turns", "response_length")
            assert [row[name] for name in same] == [of_first[name] for name in same]


@pytest.mark.slow
def test_the_whole_demo_learns(tmp_path):
    trained(4, *WORDS, "--runs", tmp_path, "--name", "demo", limit_s=400.0)
    found = evaluations(tmp_path / "demo")
    assert found[0]["mean@1"] <= 0.4 and found[-1]["mean@1"] >= 0.8
