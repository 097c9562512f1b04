"""The rules for files: texts that need not be paths, lines that end at line feeds, texts that UTF-8 cannot hold."""

import json
import os
from pathlib import Path

import pytest

from rlhf_spmd.files.json_text import json_lines
from rlhf_spmd.files.reading import NO_RIGHT, is_file, is_folder, read_lines, why_no_file
from rlhf_spmd.runtime.rewards.function import source_file

NO_PATHS = ["x" * 300, "a/" * 5000 + "b", "a\0b", "half \ud83d", "", "file/below", "nowhere"]
ODD = "Sunday\u2028Dora\u2029\x85\x0b\x0c\x1c\r\n\t é 😀 \\ud83d"


@pytest.mark.parametrize("text", NO_PATHS)
def test_a_text_that_is_no_path_names_no_file(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert not is_file(text) and not is_folder(text) or text == ""
    assert why_no_file(text) and source_file(f"{text}.py:f") is None
    assert (
        is_file("file") and why_no_file("file") == "" and is_folder(tmp_path) and why_no_file(tmp_path) == "is a folder"
    )


def test_a_folder_that_may_not_be_read_is_told(tmp_path, monkeypatch):
    def refuse(path, **_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", refuse)
    assert why_no_file(tmp_path / "file") == NO_RIGHT
    assert not is_file(tmp_path / "file") and not is_folder(tmp_path)


def test_lines_end_at_line_feeds_only(tmp_path):
    rows = [{"text": ODD}, {"text": "cut \ud83d"}, {}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json_lines(rows), encoding="utf-8")  # strict: whatever UTF-8 lacks is escaped
    assert [json.loads(line) for line in read_lines(path)] == rows
    assert len(path.read_text(encoding="utf-8").splitlines()) == 3  # for readers with another rule
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[:1]), encoding="utf-8")
    assert [json.loads(line) for line in read_lines(path)] == rows[:1]  # of earlier versions
    path.write_bytes(b"\xff\n\nlast")
    assert read_lines(path) == ["\ufffd", "", "last"] and read_lines(tmp_path / "none") == []
