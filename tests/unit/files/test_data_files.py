"""Files, folders and patterns of data: which files they stand for, in which order, and what each kind of file holds."""

import gzip
import json

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.data_files import every_file, files_of
from rlhf_spmd.runtime.data.prompts import load_prompts
from rlhf_spmd.runtime.data.readers import read_records
from tests.unit.runtime.data.test_prompts import Words

ROWS = [{"prompt": "a b", "answer": "1"}, {"prompt": 'c, d\n"e"', "answer": ""}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
CSV = 'prompt,answer\r\na b,1\r\n\r\n"c, d\n""e""",\r\n'
SAME = {"p.jsonl": LINES, "p.json": json.dumps(ROWS, indent=1), "lines.json": LINES, "p.csv": "\ufeff" + CSV}


def write(path, text):
    """Writes a file, compressed if its name says so."""
    content = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(gzip.compress(content) if path.suffix.lower() == ".gz" else content)
    return path


def load(*parts):
    return load_prompts([str(part) for part in parts], Words(), max_prompt_tokens=8)


def refusal(path) -> str:
    with pytest.raises(UserError) as error:
        list(read_records(path, "prompt"))
    return str(error.value)


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("name", SAME)
def test_every_kind_of_file_holds_the_same_rows(name, ending, tmp_path):
    assert [row for _, row in read_records(write(tmp_path / (name + ending), SAME[name]), "prompt")] == ROWS


def test_folders_and_patterns_stand_for_their_files_in_order(tmp_path):
    for name in ("b.jsonl", "a.csv", "c.json.gz", ".hidden.jsonl", "_SUCCESS", "README.md", "d.parquet.gz"):
        write(tmp_path / name, SAME["p.csv"] if "csv" in name else LINES)
    (tmp_path / "e.jsonl").mkdir()
    write(tmp_path / "e.jsonl" / "f.jsonl", LINES)
    names = ["a.csv", "b.jsonl", "c.json.gz"]
    assert [one.name for one in files_of(tmp_path)] == names
    assert [one.name for one in files_of(tmp_path / "*.js*")] == ["b.jsonl", "c.json.gz"]
    assert [one.name for one in files_of(tmp_path / "**" / "*.jsonl")] == ["b.jsonl", "f.jsonl"]
    assert every_file([str(tmp_path), "absent.jsonl"])[3:] == files_of("absent.jsonl"), "opening it says why"
    whole, apart = load(tmp_path), load(*(tmp_path / name for name in names))
    assert list(whole.texts) == list(apart.texts) == [row["prompt"] for row in ROWS] * 3
    assert whole.fingerprint() == apart.fingerprint() and whole.sizes == (6,)
    write(tmp_path / "g.txt", "new\n")
    assert load(tmp_path).fingerprint() != whole.fingerprint(), "a further file changes the inputs of a run"


def test_the_source_of_a_row_is_what_the_user_named(tmp_path):
    (tmp_path / "math").mkdir()
    for number in range(2):
        write(tmp_path / "math" / f"train-{number}.jsonl", LINES)
    write(tmp_path / "code.jsonl.gz", LINES)
    found = load(tmp_path / "math", tmp_path / "code.jsonl.gz")
    assert found.sizes == (4, 2)
    assert [row["data_source"] for row in found.records(range(6))] == ["math"] * 4 + ["code"] * 2
    with pytest.raises(UserError, match=r"train-1.jsonl twice"):
        load(tmp_path / "math", tmp_path / "math" / "*1.jsonl")
    assert "data_source" not in load(tmp_path / "math").records([0])[0]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.json", '[\n{"prompt": "a"}\n{"prompt": "b"}]', ["p.json: not valid JSON", "line 3", "a list of objects"]),
        ("p.json", '[{"prompt": "a"}, 3]', ["p.json, row 2: a number, not an object"]),
        ("p.json", '[{"prompt": "a"}, {"x": 1}]', ["row 2: no key 'prompt'", "keys there: 'x'"]),
        ("p.json", b'[{"prompt":\n "\xff"}]', ["byte 15 is not UTF-8"]),
        ("p.json", "[" * 9999, ["p.json: not valid JSON"]),
        ("p.json", '{"prompt":\n"a"}', ["p.json, line 1: not valid JSON", "each line is one object"]),
        ("p.csv", "a,b\n1,2\n", ["p.csv, row 1: no key 'prompt' (keys there: 'a', 'b')"]),
        ("p.csv", "prompt,b\n1\n", ["p.csv is not a readable .csv file", "Expected 2 columns, got 1"]),
        ("p.csv", "prompt,prompt\na,b\n", ["two of the columns prompt, prompt have one name"]),
        ("p.csv", b"prompt\n\xe9\n", ["p.csv is not a readable .csv file", "invalid UTF8"]),
        ("p.parquet.gz", "", ["files of the kind '.parquet.gz' are not read"]),
        ("p.zip", "", ["files of the kind '.zip' are not read"]),
    ],
)
def test_errors_name_file_and_place(name, text, words, tmp_path):
    message = refusal(write(tmp_path / name, text))
    assert all(word in message for word in words), message


def test_data_sets_that_datasets_saved(tmp_path):
    """Streams of Arrow, in the order of state.json; what describes data is not data."""
    import pyarrow as arrow

    table = arrow.Table.from_pylist(ROWS)
    folder = tmp_path / "saved" / "train"
    folder.mkdir(parents=True)
    parts = ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]
    for number, name in enumerate([*parts, "cache-1.arrow"]):
        kind = arrow.ipc.new_file if number == 1 else arrow.ipc.new_stream
        with arrow.OSFile(str(folder / name), "wb") as file, kind(file, table.schema) as rows:
            rows.write_table(table.slice(number, 1) if number < 2 else table)
    state = json.dumps({"_data_files": [{"filename": name} for name in parts]}, indent=1)
    for name, text in {"state.json": state, "dataset_info.json": '{\n"a": 1}'}.items():
        write(folder / name, text)
    assert list(load(folder).texts) == [row["prompt"] for row in ROWS]
    assert len(read_records(folder / parts[0], "prompt", most=1)) == 1
    write(folder / parts[0], "no table")
    assert "is not a readable .arrow file" in refusal(folder / parts[0])
    write(tmp_path / "saved" / "dataset_dict.json", '{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match="several data sets: name one, such as .*saved/train"):
        files_of(tmp_path / "saved")
    write(tmp_path / "p.jsonl", LINES)
    write(tmp_path / "dataset_infos.json", '{"default": {}}')
    assert [one.name for one in files_of(tmp_path)] == ["p.jsonl"]
