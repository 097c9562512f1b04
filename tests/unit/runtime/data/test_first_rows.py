"""The first rows of data files, read without a tokenizer: what a run refuses is refused, and nothing else."""

import json
from pathlib import Path

import pytest

from rlhf_spmd.config import presets
from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.data.first_rows import NUM_ROWS, check_first_rows

ASKED = {"role": "user", "content": "a"}


def check(algorithm: str, *files: Path, words: tuple[str, ...] = ()) -> None:
    names = ",".join(map(str, files))
    template = files[0].with_name("template.jinja")
    template.write_text("", encoding="utf-8")
    words = (f"data.prompts={names}", f"data.chat_template={template}", *words)
    check_first_rows(presets.load("tiny", words, algorithm=algorithm))


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def test_forms_that_a_run_reads_pass(tmp_path):
    path = tmp_path / "p.jsonl"
    for row in ({"prompt": "a"}, {"prompt": [ASKED]}, {"messages": [{"from": "human", "value": "a"}]}):
        check("grpo", write(path, row))
    calls = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    check("sft", write(path, {"messages": [ASKED, calls]}, {"messages": [ASKED]}))  # the second one is left out
    one, other = ([ASKED, {"role": "assistant", "content": answer}] for answer in "bc")
    check("dpo", write(path, {"chosen": one, "rejected": other}, {"prompt": "a", "chosen": one, "rejected": other}))
    check("grpo", write(path, {"question": "a"}), words=("data.key=question",))


@pytest.mark.parametrize(
    ("algorithm", "rows", "says"),
    [
        ("grpo", [], "p.jsonl is empty"),
        ("grpo", [{"prompt": " "}], "line 1: the value of 'prompt' is empty"),
        ("grpo", [{"prompt": ["a"]}], "message 1 of 'prompt' is a string"),
        (
            "sft",
            [{"text": "a b"}, {"prompt": "a", "completion": "b"}],
            "line 2: the row has a prompt and responses, and",
        ),
        ("dpo", [{"prompt": "a", "chosen": "b", "rejected": "b"}], "'chosen' and 'rejected' are equal"),
        (
            "reward_model",
            [{"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}],
            "'margin' is a string, not a",
        ),
    ],
)
def test_what_a_run_refuses_is_refused(algorithm, rows, says, tmp_path):
    with pytest.raises(UserError) as told:
        check(algorithm, write(tmp_path / "p.jsonl", *rows))
    assert says in str(told.value)


def test_only_the_first_rows_of_each_file_are_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"prompt": "a"}] * NUM_ROWS
    good, late = write(tmp_path / "good.jsonl", *rows), write(tmp_path / "late.jsonl", *rows, {"prompt": 3})
    with late.open("ab") as file:
        file.write(b"\xff not UTF-8")
    parquet.write_table(pyarrow.table({"prompt": ["a"] * NUM_ROWS + [" "]}), tmp_path / "p.parquet")
    check("grpo", good, late, tmp_path / "p.parquet")
    parquet.write_table(pyarrow.table({"prompt": ["a", " "]}), tmp_path / "p.parquet")
    with pytest.raises(UserError, match=r"p.parquet, row 2: the value of 'prompt' is empty"):
        check("grpo", good, tmp_path / "p.parquet")
