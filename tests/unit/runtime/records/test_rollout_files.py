"""Parts of rollouts: every column of every row comes back in both formats, and types do not depend on the part."""

import math

import pytest

from rlhf_spmd.runtime.records.rollout_files import other_names, read_part, types_of, write_part

OWN = {"iteration": "int", "prompt": "str", "scores": "float", "prompt_tokens": "ints", "logprobs": "floats"}
OWN |= {"turns": "turns"}
ADDED = {"iteration": 0, "prompt": "a\u2028b", "scores": None, "prompt_tokens": [1], "logprobs": [0.5, None]}
ADDED |= {
    "turns": [{"model": "", "calls": ['f({"x": 1})'], "answers": ["1"]}, {"model": "1", "calls": [], "answers": []}]
}
# Columns of three rows -> whether Arrow has a type for them.
COLUMNS = {
    "text": (["18", "\u2028", None], True),
    "mixed": (["18", 18, 1.5], False),
    "whole": ([1, 2**63 - 1, None], True),
    "large": ([1, 2**70, 10**400], False),
    "number": ([1, 1.5, math.nan], True),
    "exact": ([2**53 + 1, 1.5, None], False),
    "truth": ([True, None, False], True),
    "truth_or_number": ([True, 1, 0.5], False),
    "empty": ([{}, {}, None], False),
    "object": ([{"a": 1, "b": "x"}, {"a": 2, "b": "y"}, None], True),
    "gaps": ([{"a": 1}, {"b": None}, {"a": None}], False),
    "list": ([[1, 2], [], None], True),
    "list_of_all": ([[1, "a"], [None], []], False),
    "half": (["\ud83d", "a", None], False),
    "nothing": ([None, None, None], True),
    "scores": ([3, 4, 5], True),
    "half \ud83d": ([1, 2, 3], True),
}
ROWS = [{name: values[row] for name, (values, _) in COLUMNS.items()} for row in range(3)]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_every_value_comes_back(form, tmp_path):
    types = types_of(ROWS, list(COLUMNS))
    assert {name: kind is not None for name, kind in types.items()} == {name: one for name, (_, one) in COLUMNS.items()}
    renamed = {"scores": "data.scores"} | ({"half \ud83d": "half \\ud83d"} if form == "parquet" else {})
    schemas = set()
    for number, rows in enumerate((ROWS, ROWS[2:], [])):  # a part whose rows lack values, and one without rows
        path = tmp_path / f"part-{number}.{form}"
        write_part(path, ((ADDED, row) for row in rows), form, OWN, types, other_names(list(COLUMNS), OWN))
        found = list(read_part(path))
        assert len(found) == len(rows)
        for got, row in zip(found, rows, strict=True):
            assert {name: got[name] for name in ADDED} == ADDED
            for name, value in row.items():
                one = got[renamed.get(name, name)]
                if isinstance(value, float) and math.isnan(value):  # JSON has none
                    assert one is None
                    continue
                assert one == value and type(one) in (type(value), float), name
        if form == "parquet":
            from pyarrow import parquet

            schemas.add(str(parquet.read_schema(path)))
    assert len(schemas) == (form == "parquet")
