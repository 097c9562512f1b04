"""The option forecast_lengths: two numbers or rollouts; what they change is forecasts alone."""

import json

import pytest

from rlhf_spmd.config.forecast_lengths import read_forecast_lengths
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.workload import ResponseLengths


def test_numbers():
    assert read_forecast_lengths("", 64) is None
    assert read_forecast_lengths("48", 64) == ResponseLengths(48.0)
    assert read_forecast_lengths("48.5,0.8", 64) == ResponseLengths(48.5, 0.8)


@pytest.mark.parametrize("text", ["65", "1", "0,1", "8,inf", "8,1,2", "8;1", "-3", "no/such/file.jsonl", "+,e"])
def test_what_is_neither(text):
    with pytest.raises(UserError, match="^forecast_lengths="):
        read_forecast_lengths(text, 64)


def test_rollouts(tmp_path):
    path = tmp_path / "part-0000.jsonl"
    rows = [{"response_tokens": [1] * length, "scores": 0.0} for length in (3, 5, 100)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for text in (path, tmp_path):
        assert read_forecast_lengths(str(text), 64) == ResponseLengths(24.0, rows=(3, 5, 64))
    none = "forecast_lengths=.*: give rollouts of this program, in JSONL or Parquet .*part-0000.jsonl"
    for content, words in (
        ("{}\n", f"{none}, line 1: no key 'response_tokens'"),
        ("x\n", f"{none}, line 1: not valid JSON"),
        ('{"response_tokens": "3"}\n', "has no rows with lists of response_tokens"),
        ("", "has no rows with lists of response_tokens"),
    ):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match=words):
            read_forecast_lengths(str(path), 64)


def test_rollouts_in_parquet(tmp_path):
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    for number, rows in enumerate(([[1, 2, 3], [4]], [[5] * 100])):
        table = arrow.table({"prompt": ["p"] * len(rows), "response_tokens": rows})
        parquet.write_table(table, tmp_path / f"part-000{number}.parquet")
    assert read_forecast_lengths(str(tmp_path), 64) == ResponseLengths.of((3, 1, 64))


def test_a_program_does_not_depend_on_it():
    """Neither its fingerprint nor what `check` proves of it."""
    programs = [
        load_strategy("flattening").compile(make_workload(load("tiny", words)), Cluster.parse("1x2"), {})
        for words in ([], ["forecast_lengths=8,0.5"])
    ]
    assert programs[0].fingerprint == programs[1].fingerprint
    lengths = [program.workload.row_lengths[1] for program in programs]
    assert lengths[1] == 8 and lengths[0] == programs[0].workload.max_response > 8
