"""The tools that come with the package."""

import json

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.hf import tool_schema
from rlhf_spmd.runtime.environments.adapters import load_environments
from rlhf_spmd.tools import MOST_TEXT, Passages, python

TEXTS = ["Rome is a city in Italy.", "Bern is a city, the capital of Switzerland.", "A cat sleeps.", "Rome Rome Rome"]


def test_a_search_finds_the_passages_with_the_rare_words_first(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    passages = Passages(file)
    assert passages.search("the capital of SWITZERLAND?") == TEXTS[1:2]
    assert passages.search("city") == TEXTS[:2] and passages.search("Rome", most=1) == TEXTS[3:]
    assert passages.search("dog") == passages.search("") == []
    for wrong in ("nothing.jsonl", "p.jsonl"):
        with pytest.raises(UserError, match=f"{wrong} has no passages .*with 'body'"):
            Passages(tmp_path / wrong, "body")


def test_a_program_is_run_and_its_limits_are_told(monkeypatch):
    assert python("print(6 * 7)") == "42\n"
    assert python("import sys; print(1); sys.exit(3)") == "1\n\nerror: the program ended with status 3"
    assert "ZeroDivisionError" in python("1 / 0") and "/" not in python("import os; print(os.environ['HOME'])")
    assert "MemoryError" in python("x = bytearray(2**31)")
    assert "File too large" in python("open('x', 'wb').write(bytes(2**21))")
    assert len(python("print('a' * 10**5)")) == MOST_TEXT + len(" ... ")
    monkeypatch.setenv("SECRET", "1")
    assert python("import os; print('SECRET' in os.environ)") == "False\n"
    assert python("\0").startswith("error: ") and python("x" * 10**6).startswith("error: ")
    monkeypatch.setattr("rlhf_spmd.tools.LIMIT_S", 1)
    assert python("import time; time.sleep(60)") == "error: the program took more than 1 s"


def test_it_is_an_environment():
    found = load_environments("rlhf_spmd.tools:python")[""]
    assert found.is_stateless and found.schemas(tool_schema)[0]["function"]["name"] == "python"
