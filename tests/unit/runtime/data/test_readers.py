"""What Parquet holds beside texts and numbers, and the names of kinds."""

import datetime
import decimal
import json

import pyarrow as arrow
import pytest

from rlhf_spmd.runtime.data.messages import messages_of
from rlhf_spmd.runtime.data.prompts import load_prompts
from rlhf_spmd.runtime.data.readers import read_records
from tests.unit.runtime.data.test_prompts import Words

DATE = datetime.date(2024, 2, 29)


def records(tmp_path, **columns) -> list[dict]:
    from pyarrow import parquet

    parquet.write_table(arrow.table(columns), tmp_path / "p.parquet")
    return [record for _, record in read_records(tmp_path / "p.parquet", "prompt")]


def test_what_json_has_no_type_for_becomes_text(tmp_path):
    columns = {
        "date": [DATE],
        "exact": [decimal.Decimal("1.50")],
        "nanoseconds": arrow.array([1], arrow.timestamp("ns")),
        "image": arrow.array([{"bytes": b"\x89PNG", "path": b"a"}]),
        "half": arrow.array([1.5], arrow.float32()).cast(arrow.float16()),
    }
    records(tmp_path, prompt=["a"], **columns)
    found = load_prompts(tmp_path / "p.parquet", Words(), max_prompt_tokens=8)
    (row,) = found.records([0])
    assert row == {
        "date": "2024-02-29",
        "exact": "1.50",
        "nanoseconds": "1970-01-01 00:00:00.000000001",
        "image": {"bytes": "\\x89PNG", "path": "a"},
        "half": 1.5,
    }
    assert found.column_names == tuple(columns)


def test_changed_columns_change_their_fingerprint_only(tmp_path):
    def fingerprints(answers) -> tuple[str, str]:
        lines = (json.dumps({"prompt": "a", "answer": answer}) + "\n" for answer in answers)
        (tmp_path / "p.jsonl").write_text("".join(lines), encoding="utf-8")
        found = load_prompts(tmp_path / "p.jsonl", Words(), max_prompt_tokens=8)
        assert list(found.fingerprints("p")) == ["prompts in p", "columns of the prompts in p"]
        return tuple(found.fingerprints("p").values())

    tokens, columns = fingerprints(["ab", "c"])
    assert fingerprints(["ab", "c"]) == (tokens, columns)
    for others in (["a", "bc"], ["ab", "d"], ["ab", None]):
        assert fingerprints(others)[0] == tokens and fingerprints(others)[1] != columns


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TEXT = json.dumps(CALL["function"])
CALLS = {  # a message that calls f(x=1) -> the role of its answer
    "tool": [
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": json.dumps([CALL])},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
    ],
    "function": [{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}}],
    "observation": [{"from": "function_call", "value": TEXT}, {"from": "function_call", "value": f"[{TEXT}]"}],
    "tool_response": [{"role": "tool_call", "content": TEXT}],
}


@pytest.mark.parametrize("answer", CALLS)
def test_every_spelling_of_a_call_is_read_as_one(answer):
    for call in CALLS[answer]:
        names = ("from", "value") if answer == "observation" else ("role", "content")
        row = {"m": [call, dict(zip(names, (answer, "1"), strict=True))]}
        found = messages_of("here", row, "m")
        content = {"content": ""} if "function_call" not in call and "tool_calls" not in call else {}
        assert found == [{"role": "assistant", "tool_calls": [CALL], **content}, {"role": "tool", "content": "1"}]
