"""Rows of results, which of them a document may show; the command line of benches."""

import json

import pytest

from bench import rows


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
