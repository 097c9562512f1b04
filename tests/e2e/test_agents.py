"""The embedded task with tools, done by an agent that asks the model itself (`make demo-agent`): it learns, and its
tokens depend neither on ranks, nor on the client that asks, nor on a kill."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.e2e.test_tools import OWN, SLICES, THREE, WORDS, killed, rows, trained, weights_of
from tests.page_runs import evaluations, hashes
from tests.size_rules import REPOSITORY as ROOT

AGENT = (*WORDS, f"environment={ROOT}/examples/agent.py:run", "reward_function=")
STAGES = ("--strategy", "reallocation", "strategy.generation_pp=2")
SMALL = ("iterations=2", "rollout_batch=2", "mini_batch=16", "eval.prompts=")
needs_openai = pytest.mark.skipif(not importlib.util.find_spec("openai"), reason="the package openai is not installed")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("agent")
    trained(2, *AGENT, *SMALL, "--runs", folder, "--name", "on-2", "rollouts.every=1", limit_s=300.0)
    return folder / "on-2"


def test_an_agent_trains(run):
    for row in rows(run):
        assert 1.0 < row["tool_calls"] < 3.5 and 2.0 < row["turns"] < 4.5 and 0 < row["reward"] < 1
        assert row["agent_mismatches"] == row["tool_timeouts"] == 0 and row["end_tool_stopped"] > 0.9
    texts = [path.read_text(encoding="utf-8") for path in (run / "rollouts").rglob("*.jsonl")]
    samples = [json.loads(line) for text in texts for line in text.split("\n")[:-1]]
    first = next(row for row in samples if row["scores"] == 1)
    assert [bool(turn["calls"]) for turn in first["turns"]][-2:] == [True, False]
    assert first["turns"][-1]["model"] == first["answer"]


@pytest.mark.parametrize(
    ("ranks", "own"),
    [
        (1, ()),
        pytest.param(2, SLICES, marks=pytest.mark.slow),  # tests/mpi/test_episodes.py has slices
        pytest.param(2, STAGES, marks=pytest.mark.slow),
        pytest.param(4, (*STAGES, "strategy.generation_tp=2"), marks=pytest.mark.slow),
        pytest.param(4, (), marks=pytest.mark.slow),
    ],
)
def test_tokens_do_not_depend_on_ranks(run, ranks, own, tmp_path):
    words = ("--runs", tmp_path, "--name", "run", "environment_workers=2", *own)
    trained(ranks, *AGENT, *SMALL, *words, limit_s=300.0)
    assert hashes(tmp_path / "run") == hashes(run)


@needs_openai
@pytest.mark.slow
@pytest.mark.parametrize("own", ["import openai", "import openai\nOWN = openai.AsyncOpenAI"])
def test_clients_of_openai_get_the_same_tokens(run, own, tmp_path):
    """The one that is given to the agent, and one that it makes itself and keeps for all episodes."""
    source = (ROOT / "examples" / "agent.py").read_text(encoding="utf-8")
    source = source.replace("import json", f"from functools import cache\nimport json\n{own}", 1)
    if "OWN" in own:
        source = source.replace("    messages = list", "    client = cache(OWN)()\n    messages = list")
    (tmp_path / "own.py").write_text(source, encoding="utf-8")
    words = (*AGENT, f"environment={tmp_path}/own.py:run", *SMALL, "--runs", tmp_path, "--name", "own")
    trained(2, *words, limit_s=400.0)
    assert hashes(tmp_path / "own") == hashes(run)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["before a call", "in a call", "after an answer", "in training"])
def test_a_kill_at_any_place_leaves_the_same_bits(place, tmp_path):
    environment = f"environment={OWN}:agent"
    for name in ("whole", "killed"):
        words = (*WORDS, *THREE, "--runs", tmp_path, "--name", "whole", environment)
        if name == "whole":
            trained(2, *words, limit_s=400.0, DEADLY=str(tmp_path))
        else:
            killed(2, place, tmp_path / name, environment)
            trained(2, "--resume", tmp_path / name, limit_s=400.0, DEADLY=str(tmp_path))
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    assert weights_of(tmp_path / "killed") == weights_of(tmp_path / "whole")


@pytest.mark.slow
def test_the_whole_demo_learns(tmp_path):
    trained(4, *AGENT, "iterations=10", "--runs", tmp_path, "--name", "demo", limit_s=400.0)
    found = evaluations(tmp_path / "demo")
    assert found[0]["mean@1"] <= 0.4 and found[-1]["mean@1"] >= 0.8
