"""Rows of results, which of them a document may show; the command line of benches."""

import json

import pytest

from bench import rows
from bench.__main__ import main


@pytest.mark.parametrize("commit", ["1a2b3c4-dirty", None])
def test_a_document_shows_no_row_whose_commit_does_not_say_what_ran(tmp_path, monkeypatch, commit):
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    (tmp_path / "speed.jsonl").write_text(json.dumps({"commit": "1a2b3c4"}) + "\n", encoding="utf-8")
    assert rows.clean_rows("speed") == [{"commit": "1a2b3c4"}]
    monkeypatch.setattr(rows.OUTPUT, "folder", tmp_path)
    rows.add("speed", [{"commit": commit}])
    with pytest.raises(ValueError, match="speed.jsonl: 1 of 2 rows were measured with changes that no commit holds"):
        rows.clean_rows("speed")


def test_all_results_are_from_clean_commits():
    for path in sorted(rows.RESULTS.glob("*.jsonl")):
        rows.clean_rows(path.stem)


def test_rows_that_are_there_are_measured_again_only_if_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "OUTPUT", rows.Output(tmp_path))
    number, cases = iter(range(9)), [{"case": 1}, {"case": 2}]

    def filled() -> list[int]:
        return [row["number"] for row in rows.fill("any", cases, lambda case: {"number": next(number)})]

    assert filled() == [0, 1] == filled()
    rows.OUTPUT.again = True
    assert filled() == [2, 3] and [row["number"] for row in rows.read_rows(tmp_path / "any.jsonl")] == [2, 3]


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        ([], 0, "scan: forecasts of the strategies"),
        (["--help"], 0, "cost: ten minutes of a core"),
        (["scam"], 2, "bench scam: error: unknown bench 'scam' (did you mean 'scan'?)"),
        (["scan", "--layout", "1by8"], 2, "bench scan: error: layout '1by8' is not of the form NxG"),
    ],
)
def test_usage_and_errors(words, status, text, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench", *words])
    assert main() == status
    printed = capsys.readouterr()
    assert text in printed.out + printed.err
