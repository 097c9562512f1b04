"""The rules for files: texts that need not be paths, lines that end at line feeds, JSON that UTF-8 can hold."""

import json
import os
import sys
from pathlib import Path

import pytest

from rlhf_spmd.config import presets
from rlhf_spmd.config.options import prompt_files
from rlhf_spmd.files.json_text import json_lines, json_text
from rlhf_spmd.files.reading import NO_RIGHT, is_file, is_folder, read_lines, why_no_file
from rlhf_spmd.pages.user_module import load_module
from rlhf_spmd.runtime.observe import flight_recorder
from rlhf_spmd.runtime.records.loggers import Curves
from rlhf_spmd.runtime.records.run_folder import RunFolder, Sample
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


def test_many_prompt_files_are_no_path(tmp_path):
    names = [f"part-{number:05d}-of-00064.jsonl" for number in range(64)]
    assert prompt_files(presets.load("tiny", [f"data.prompts={','.join(names)}"])) == names
    one = tmp_path / "a,b.jsonl"
    one.touch()
    assert prompt_files(presets.load("tiny", [f"data.prompts={one}"])) == [str(one)]


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


def test_json_of_any_value():
    assert json_text({"é": "😀"}) == '{"é": "😀"}'
    for value in (2**70, {}, [1, "a", None], "\ud83d\ude00", {"\udc00": float("inf")}):
        assert json.loads(json_text(value).encode()) == json.loads(json.dumps(value))


def test_samples_of_any_text_are_read_again(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_samples([Sample(0, ODD, ODD + "\ud83d", 1.0), Sample(1, "b", "", 2.0)])
    assert folder.samples_before() == [(ODD + "\ud83d", 1.0, False), ("", 2.0, False)]
    with (tmp_path / "samples.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"before": "\\U0001f600"}\n')  # no escape of JSON: a run of an earlier version in another locale
    with pytest.raises(Exception, match=r"samples.jsonl, line 3 is no sample of this run; restore the file, or delete"):
        folder.samples_before()


def test_messages_and_names_of_curves_may_be_no_text(tmp_path):
    (tmp_path / "flight").mkdir()
    flight_recorder.keep_message(str(tmp_path), "cut \ud83d é")
    assert flight_recorder.read_message(tmp_path) == "cut \\ud83d é"
    pytest.importorskip("tensorboard")
    curves = Curves(tmp_path, [])
    curves.add(0, {"eval/mean@1/cut \ud83d": 1.0})
    curves.close()


def test_a_page_in_another_encoding_is_kept_as_utf8(tmp_path):
    page = tmp_path / "page.py"
    page.write_bytes('# A page.\n# -*- coding: latin-1 -*-\nTEXT = "für"\n'.encode("latin-1"))
    module, source = load_module("strategy", str(page), "rlhf_spmd.strategies", [])
    assert module.TEXT == "für"
    copy = tmp_path / "copy.py"
    copy.write_text(source, encoding="utf-8")
    again, kept = load_module("strategy", str(copy), "rlhf_spmd.strategies", [])
    assert again.TEXT == "für" and kept == source


def test_a_locale_that_lacks_a_character_does_not_end_a_verb(tmp_path):
    from tests.run_mpi import environment_alone, run_limited

    part = tmp_path / "rollouts" / "iteration-000000" / "part-00000.jsonl"
    part.parent.mkdir(parents=True)
    row = {"iteration": 0, "prompt_index": 0, "sample": 0, "prompt": "é", "response": "\ud83d😀"}
    part.write_text(json.dumps(row) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "rlhf_spmd", "rollouts", str(tmp_path)]
    environment = environment_alone(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    status, stdout, stderr = run_limited(command, limit_s=60, environment=environment)
    assert status == 0 and "prompt: \\xe9" in stdout, stderr
    status, stdout, stderr = run_limited([*command, "--json"], limit_s=60, environment=environment)
    assert status == 0 and json.loads(stdout) == row, stderr
