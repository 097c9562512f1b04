"""JSON of any value and of any text."""

import json

from rlhf_spmd.files.json_text import json_text


def test_json_of_any_value():
    assert json_text({"é": "😀"}) == '{"é": "😀"}'
    for value in (2**70, {}, [1, "a", None], "\ud83d\ude00", {"\udc00": float("inf")}):
        assert json.loads(json_text(value).encode()) == json.loads(json.dumps(value))
