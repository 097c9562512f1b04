"""The option forecast_episodes, and what the log of a run says of its episodes."""

import json

import pytest

from rlhf_spmd.config.forecast_episodes import measured, read_forecast_episodes
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.cost.answers import longest_s
from rlhf_spmd.plan.workload import Answers

ROW = {"turns": 3.0, "answer_tokens": 40.0, "answers": 4.0, "tool_s": 0.25, "tool_p95_s": 0.75}


def test_numbers_and_runs(tmp_path):
    assert read_forecast_episodes("", 64, 112) == Answers(2, 48, 0.1, 0.3)
    assert read_forecast_episodes("4,20,0.5,1.5", 64, 112) == Answers(4, 20, 0.5, 1.5)
    lines = [ROW, ROW | {"turns": 5.0, "answers": 8.0, "tool_s": None, "tool_p95_s": 0.0}]  # without answers
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines), encoding="utf-8")
    assert read_forecast_episodes(str(tmp_path), 64, 112) == Answers(4, 40, 0.5, 1.5)  # two calls in a turn
    assert measured([{"reward": 1.0}]) is None and measured([ROW | {"turns": 1.0}]) == Answers(1, 40, 0, 0)


@pytest.mark.parametrize("text", ["4", "0.5,20,1,2", "4,20,2,1", "4,20,-1,1", "a,b,c,d", "nan,1,1,1", "no/such"])
def test_what_is_no_forecast(text):
    with pytest.raises(UserError, match="forecast_episodes=.* is neither TURNS,TOKENS,MEAN_S,P95_S nor the folder"):
        read_forecast_episodes(text, 64, 112)


@pytest.mark.parametrize(("mean", "most"), [(0.5, 1.934), (7, 27.076), (0, 0)])
def test_a_percentile_that_no_lognormal_has(mean, most, tmp_path):
    """The message says the limit, which can then be given; three percentiles never give one forecast."""
    said = f"which is between the mean and 3.868 means .{most} s.; give"
    for p95 in (most * 1.001 + 0.001, 40.0):
        with pytest.raises(UserError, match=f"^forecast_episodes=4,20,{mean},.*: no lognormal has a mean .*{said}"):
            read_forecast_episodes(f"4,20,{mean},{p95}", 64, 112)
        with pytest.raises(AssertionError, match="no lognormal has"):
            longest_s(Answers(4, 20, mean, p95), 8)
    assert read_forecast_episodes(f"4,20,{mean},{most}", 64, 112) == Answers(4, 20, mean, most)


@pytest.mark.parametrize("p95_s", [0.2, 2.5])
def test_a_run_with_a_percentile_that_no_lognormal_has(p95_s, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROW | {"tool_p95_s": p95_s}) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=f"^forecast_episodes=.*: no lognormal has a mean of 0.5 s .* {2 * p95_s:g} s"):
        read_forecast_episodes(str(tmp_path), 64, 112)


def test_answers_have_room_in_responses_of_the_forecast_length():
    def answers(*words: str) -> Answers:
        given = ["environment=m:f", "episode.max_row_tokens=96", "generation.max_new_tokens=24", *words]
        return make_workload(load("tiny", given)).answers

    assert answers().tokens == 72 and answers("forecast_lengths=16").tokens == 12
    assert answers("forecast_episodes=3,95,0,0").tokens == 95
    for words in (["forecast_episodes=3,96,0,0"], ["forecast_episodes=3,16,0,0", "forecast_lengths=16,0.5"]):
        with pytest.raises(UserError, match=r"answers of \d+ tokens have no room in an episode of \d+"):
            answers(*words)


def test_a_folder_that_is_no_run_with_episodes(tmp_path):
    with pytest.raises(UserError, match="no metrics.jsonl; give the folder of a run"):
        read_forecast_episodes(str(tmp_path), 64, 112)
    (tmp_path / "metrics.jsonl").write_text('{"reward": 1.0}\n', encoding="utf-8")
    with pytest.raises(UserError, match="the run had no environment"):
        read_forecast_episodes(str(tmp_path), 64, 112)
