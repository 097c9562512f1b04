"""The bench of kills: its verdicts, and what it compares."""

import pytest

from bench.faults.faults import summary
from bench.tables import text_table

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
