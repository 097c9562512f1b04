"""Agents whose episodes have several rows: what training compares are episodes, and neither ranks nor the times at
which requests come, nor rows that stay blank, nor a kill, change a bit of the weights."""

import importlib.util
import json
import statistics
from pathlib import Path

import pytest

from tests import environments
from tests.e2e.test_tools import SLICES, THREE, WORDS, killed, rows, trained, weights_of

FILE = Path(environments.__file__).with_name("several_rows.py")
SIZES = (
    "rollout_batch=2",
    "samples_per_prompt=3",
    "iterations=2",
    "data.max_prompt=64",
    "generation.max_new_tokens=24",
)
SIZES += ("episode.max_row_tokens=64", "micro_batch=4", "eval.prompts=", "reward_function=", "rollouts.every=1")
SAME = ("reward", "turns", "episode_rows", "actor_grad_norm", "policy_loss", "entropy")
needs_openai = pytest.mark.skipif(not importlib.util.find_spec("openai"), reason="the package openai is not installed")


def run_of(folder: Path, name: str, agent: str, ranks: int, *own, num: int = 3) -> Path:
    """Trains with episodes of so many rows."""
    words = (*WORDS, *SIZES, f"environment={FILE}:{agent}", f"episode.rows={num}", f"mini_batch={6 * num}")
    trained(ranks, *words, "--runs", folder, "--name", name, *own, limit_s=400.0)
    return folder / name


def samples_of(run: Path) -> list[dict]:
    texts = [path.read_text(encoding="utf-8") for path in sorted((run / "rollouts").rglob("*.jsonl"))]
    return [json.loads(line) for text in texts for line in text.split("\n")[:-1]]


def episodes_of(run: Path, num: int) -> dict[tuple[int, int], dict[int, list[dict]]]:
    """Returns the rows of each episode, by its number, of each group."""
    found: dict[tuple[int, int], dict[int, list[dict]]] = {}
    for row in samples_of(run):
        group = found.setdefault((row["iteration"], row["prompt_index"]), {})
        group.setdefault(row["sample"] // num, []).append(row)
    return found


def test_groups_compare_episodes(tmp_path):
    """However many rows they have; these are written one after the other, and blank ones are not."""
    run = run_of(tmp_path, "run", "delegates", 1, num=4)
    found, metrics = episodes_of(run, 4), rows(run)
    assert len(found) == 4 and all(len(group) == 3 for group in found.values())
    assert {len(of_episode) for group in found.values() for of_episode in group.values()} <= {2, 3}
    for group in found.values():
        rewards = [of_episode[0]["scores"] for of_episode in group.values()]
        for of_episode in group.values():
            assert [row["sample"] % 4 for row in of_episode] == list(range(len(of_episode)))
            wanted = (of_episode[0]["scores"] - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-4)
            for row in of_episode:
                assert row["scores"] == of_episode[0]["scores"]
                assert row["advantages"] == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    for number, row in enumerate(metrics):
        groups = [group for (iteration, _), group in found.items() if iteration == number]
        scores = [of_episode[0]["scores"] for group in groups for of_episode in group.values()]
        assert row["reward"] == pytest.approx(statistics.mean(scores))
        assert row["episode_rows"] == sum(map(len, (rows for group in groups for rows in group.values()))) / 6
        assert row["agent_mismatches"] == 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return run_of(tmp_path_factory.mktemp("rows"), "whole", "gathers", 1, num=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "ranks", "own"),
    [
        ("gathers", 2, ()),
        pytest.param("by_openai", 2, SLICES, marks=needs_openai),
        pytest.param("by_openai", 1, (), marks=needs_openai),
        ("gathers", 1, ("generation.max_sequences=2",)),
        ("gathers", 4, ("--strategy", "reallocation", "strategy.generation_pp=2", "strategy.generation_tp=2")),
    ],
)
def test_tokens_depend_neither_on_ranks_nor_on_times(whole, agent, ranks, own, tmp_path):
    run = run_of(tmp_path, "run", agent, ranks, *own, num=4)
    assert [row["tokens_sha256"] for row in rows(run)] == [row["tokens_sha256"] for row in rows(whole)]
    if ranks == 1:
        assert weights_of(run) == weights_of(whole)


@pytest.mark.slow
def test_blank_rows_weigh_nothing(whole, tmp_path):
    run = run_of(tmp_path, "run", "gathers", 1, num=7)
    assert [[row[name] for name in SAME] for row in rows(run)] == [[row[name] for name in SAME] for row in rows(whole)]
    assert weights_of(run) == weights_of(whole)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "own"), [("rloo", ()), ("reinforce_plus_plus", ("baseline=group",))])
def test_other_algorithms_train(algorithm, own, tmp_path):
    words = [f"{algorithm}.{word}" for word in ("kl_coef=0.5", *own)]
    run = run_of(tmp_path, "run", "drops", 2, "--algorithm", algorithm, *words)
    for group in episodes_of(run, 3).values():
        for of_episode in group.values():
            if algorithm == "rloo":
                assert len({row["advantages"] for row in of_episode}) == 1
            else:
                assert all(len(row["advantages"]) == len(row["drawn"]) for row in of_episode)


@pytest.mark.slow
def test_a_kill_leaves_the_same_bits(tmp_path):
    own = (*SIZES[:-3], "iterations=3", "reward_function=", "episode.rows=4", "mini_batch=24")
    own += (f"environment={FILE}:delegates",)
    words = (*WORDS, *THREE, "--runs", tmp_path, "--name", "whole", *own)
    trained(2, *words, limit_s=400.0, DEADLY=str(tmp_path))
    killed(2, "in a call", tmp_path / "killed", *own)
    trained(2, "--resume", tmp_path / "killed", limit_s=400.0, DEADLY=str(tmp_path))
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    assert weights_of(tmp_path / "killed") == weights_of(tmp_path / "whole")
