"""The bench of kills: its verdicts, and what it compares."""

import json

import pytest

from bench.faults.faults import summary
from bench.tables import text_table
from tests.started import outcome

POINT = {
    "algorithm": "ppo",
    "strategy": "flattening",
    "rank": 2,
    "equal": True,
    "hang": False,
    "orphans": 0,
    "named": True,
    "end_s": 0.3,
}
TOO_LATE = POINT | {"rank": None, "named": False}  # the run had ended before: nobody was killed, nobody can be named


@pytest.mark.parametrize("wrong", [{"equal": False}, {"hang": True}, {"orphans": 1}, {"named": False}])
def test_one_bad_point_is_not_ok(wrong):
    others = [POINT | {"strategy": "separation", "equal": False}]
    assert summary("ppo", "flattening", [POINT, POINT, TOO_LATE, *others])["ok"]
    row = summary("ppo", "flattening", [POINT, POINT | wrong, *others])
    assert not row["ok"] and row["points"] == 2
    assert "flattening" in text_table("faults", [row])


def test_a_row_was_measured_where_its_points_were():
    """Not where the bench ended that went on with those of an earlier commit."""
    points = [POINT | {"commit": "a"}, POINT | {"commit": "b"}, POINT | {"strategy": "separation", "commit": "c"}]
    assert summary("ppo", "flattening", points)["commit"] == "b"


def test_times_are_not_compared_and_all_else_is(tmp_path):
    def run(name: str, weights: bytes = b"weights", **metrics):
        folder = tmp_path / name
        for iteration in (3, 4):
            (folder / "checkpoints" / f"iteration-00000{iteration}").mkdir(parents=True)
            (folder / "checkpoints" / f"iteration-00000{iteration}" / "rank-0000.safetensors").write_bytes(weights)
            (folder / "checkpoints" / f"iteration-00000{iteration}" / "state.json").write_text("{}", encoding="utf-8")
        (folder / "metrics.jsonl").write_text(
            json.dumps({"iteration": 0, "reward": 1.0, **metrics}) + "\n", encoding="utf-8"
        )
        return outcome(folder)

    first = run("first", iteration_s=1.0)
    assert first == run("second", iteration_s=2.0, generate_s=1.0)
    assert first != run("third", reward=1.0000000000000002)
    assert first != run("fourth", weights=b"weighty")
    assert first != run("fifth", parity_max_abs=1e-6)
    # with tools, it depends on when answers come which rows are drawn together
    assert run("sixth", tool_calls=2.0, parity_max_abs=1e-6, tool_s=0.5) == run("seventh", tool_calls=2.0)
    assert run("eighth", tool_calls=2.0) != run("ninth", tool_calls=2.5)
