"""JSON of any value and of any text."""

import json

from rlhf_spmd.files.json_text import json_text
from rlhf_spmd.runtime.records.run_folder import RunFolder, Sample
from tests.unit.files.test_reading import ODD


def test_json_of_any_value():
    assert json_text({"é": "😀"}) == '{"é": "😀"}'
    for value in (2**70, {}, [1, "a", None], "\ud83d\ude00", {"\udc00": float("inf")}):
        assert json.loads(json_text(value).encode()) == json.loads(json.dumps(value))


def test_samples_of_any_text_are_read_again(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_samples([Sample(0, ODD, ODD + "\ud83d", 1.0), Sample(1, "b", "", 2.0)])
    rows = [(row["before"], row["reward_before"]) for row in folder.rows("samples.jsonl")]
    assert rows == [(ODD + "\ud83d", 1.0), ("", 2.0)]
