"""The option forecast_episodes, and what the log of a run says of its episodes."""

import json

import pytest

from rlhf_spmd.config.forecast_episodes import measured, read_forecast_episodes
from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.workload import Answers

ROW = {"turns": 3.0, "answer_tokens": 40.0, "answers": 4.0, "tool_s": 0.25, "tool_p95_s": 1.0}


def test_numbers_and_runs(tmp_path):
    assert read_forecast_episodes("", 64, 112) == Answers(2, 48, 0.1, 0.5)
    assert read_forecast_episodes("4,20,0.5,3", 64, 112) == Answers(4, 20, 0.5, 3)
    lines = [ROW, ROW | {"turns": 5.0, "answers": 8.0, "tool_s": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines), encoding="utf-8")
    assert read_forecast_episodes(str(tmp_path), 64, 112) == Answers(4, 40, 0.5, 2)  # two calls in a turn
    assert measured([{"reward": 1.0}]) is None and measured([ROW | {"turns": 1.0}]) == Answers(1, 40, 0, 0)


@pytest.mark.parametrize(
    "text", ["4", "0.5,20,1,2", "4,112,1,2", "4,20,2,1", "4,20,-1,1", "a,b,c,d", "nan,1,1,1", "no/such"]
)
def test_what_is_no_forecast(text):
    with pytest.raises(UserError, match="forecast_episodes=.* is neither TURNS,TOKENS,MEAN_S,P95_S nor the folder"):
        read_forecast_episodes(text, 64, 112)


def test_a_folder_that_is_no_run_with_episodes(tmp_path):
    with pytest.raises(UserError, match="no metrics.jsonl; give the folder of a run"):
        read_forecast_episodes(str(tmp_path), 64, 112)
    (tmp_path / "metrics.jsonl").write_text('{"reward": 1.0}\n', encoding="utf-8")
    with pytest.raises(UserError, match="the run had no environment"):
        read_forecast_episodes(str(tmp_path), 64, 112)
