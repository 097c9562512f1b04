"""The options forecast_lengths and forecast_episodes; what they change is forecasts alone."""

import gzip
import json

import pytest

from rlhf_spmd.config.forecast_options import measured, read_forecast_episodes, read_forecast_lengths
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.workload import Answers, ResponseLengths

ROW = {"turns": 3.0, "answer_tokens": 40.0, "answers": 4.0, "tool_s": 0.25, "tool_p95_s": 0.75}


def test_rollouts(tmp_path):
    path = tmp_path / "part-0000.jsonl"
    rows = [{"response_tokens": [1] * length, "scores": 0.0} for length in (3, 5, 100)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for text in (path, tmp_path):
        assert read_forecast_lengths(str(text), 64) == ResponseLengths(24.0, rows=(3, 5, 64))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    for name in ("rows.jsonl.gz", "rows.json"):
        assert read_forecast_lengths(str(tmp_path / name), 64) == ResponseLengths(24.0, rows=(3, 5, 64))


def test_a_program_does_not_depend_on_it():
    """Neither its fingerprint nor what `check` proves of it."""
    programs = [
        load_strategy("flattening").compile(make_workload(load("tiny", words)), Cluster.parse("1x2"), {})
        for words in ([], ["forecast_lengths=8,0.5"])
    ]
    assert programs[0].fingerprint == programs[1].fingerprint
    lengths = [program.workload.row_lengths[1] for program in programs]
    assert lengths[1] == 8 and lengths[0] == programs[0].workload.max_response > 8


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


def test_answers_have_room_in_responses_of_the_forecast_length():
    def answers(*words: str) -> Answers:
        given = ["environment=m:f", "episode.max_row_tokens=96", "generation.max_new_tokens=24", *words]
        return make_workload(load("tiny", given)).answers

    assert answers().tokens == 72 and answers("forecast_lengths=16").tokens == 12
    assert answers("forecast_episodes=3,95,0,0").tokens == 95
    for words in (["forecast_episodes=3,96,0,0"], ["forecast_episodes=3,16,0,0", "forecast_lengths=16,0.5"]):
        with pytest.raises(UserError, match=r"answers of \d+ tokens have no room in an episode of \d+"):
            answers(*words)
