"""The order of prompts of several files: shares by weights, epochs of each file, and no dependence on history."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.data.prompt_order import PromptOrder
from rlhf_spmd.runtime.data.prompts import load_prompts
from tests.unit.runtime.data.test_prompts import Words

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=4)
WEIGHTS = st.floats(0.01, 100)


def draw_order(data) -> PromptOrder:
    sizes = tuple(data.draw(SIZES))
    weights = tuple(data.draw(WEIGHTS) for _ in sizes)
    return PromptOrder(sizes, weights, data.draw(st.integers(0, 2**64 - 1)), data.draw(st.booleans()))


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 40))
def test_weights_are_shares_and_epochs_are_those_of_each_file(data, rollout_batch):
    order = draw_order(data)
    firsts = [sum(order.sizes[:file]) for file in range(len(order.sizes))]
    batches = [order.batch(iteration, rollout_batch) for iteration in range(12)]
    of_file = [
        [index for batch in batches for index in batch if first <= index < first + size]
        for first, size in zip(firsts, order.sizes, strict=True)
    ]
    total = 12 * rollout_batch
    assert sum(map(len, of_file)) == total
    for used, first, size, weight in zip(of_file, firsts, order.sizes, order.weights, strict=True):
        assert abs(len(used) - total * weight / sum(order.weights)) <= 0.5 + len(order.sizes) / 2
        for start in range(0, len(used) - size + 1, size):
            assert sorted(used[start : start + size]) == list(range(first, first + size))  # an epoch
        for batch in batches:
            mine = Counter(index for index in batch if first <= index < first + size)
            assert sum(mine.values()) > size or max(mine.values(), default=1) == 1  # repeats only where it must
    late = data.draw(st.integers(0, 11))
    fresh = PromptOrder(order.sizes, order.weights, order.seed, order.shuffle)
    assert fresh.batch(late, rollout_batch) == batches[late] == order.batch(late, rollout_batch)


@pytest.mark.parametrize("weights", [(0.7, 0.3), (7, 3), (0.07, 0.03)])
def test_the_mixture_of_each_iteration_is_that_of_the_weights(weights):
    order = PromptOrder((1000, 50), weights, seed=3)
    for iteration in range(20):
        assert sum(index < 1000 for index in order.batch(iteration, 10)) == 7
    used = [index for iteration in range(50) for index in order.batch(iteration, 10) if index >= 1000]
    assert len(used) == 150 and [Counter(used)[index] for index in range(1000, 1050)] == [3] * 50  # three epochs


# ---- several files ---------------------------------------------------------------------------------------------------


def write(path: Path, *rows: dict | str) -> str:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return str(path)


def test_files_follow_each_other_and_rows_know_theirs(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    one = write(tmp_path / "math.jsonl", {"prompt": "a"}, {"prompt": "b c", "data_source": "mine", "answer": "1"})
    parquet.write_table(pyarrow.table({"prompt": ["d"], "answer": ["2"]}), tmp_path / "code.parquet")
    three = write(tmp_path / "chat.txt", "e", "f")
    found = load_prompts([one, str(tmp_path / "code.parquet"), three], Words(), max_prompt_tokens=8, weights=(1, 2, 3))
    assert list(found.texts) == ["a", "b c", "d", "e", "f"] and found.sizes == (2, 1, 2)
    assert found.records(range(4)) == [
        {"data_source": "math"},
        {"data_source": "mine", "answer": "1"},
        {"data_source": "code", "answer": "2"},
        {"data_source": "chat"},
    ]
    assert found.source == f"{one},{tmp_path / 'code.parquet'},{three}"
    (tmp_path / "b").mkdir()
    other = write(tmp_path / "b" / "math.jsonl", {"prompt": "x"})
    assert load_prompts([one, other], Words(), max_prompt_tokens=8).records([0]) == [{"data_source": one}]
    assert load_prompts(one, Words(), max_prompt_tokens=8).records([0]) == [{}]  # a single file adds no column


def test_the_order_is_part_of_the_fingerprint(tmp_path):
    files = [write(tmp_path / "a.txt", "a", "b"), write(tmp_path / "b.txt", "c d")]
    ways = ({}, {"weights": (1, 2)}, {"weights": (2, 1)}, {"shuffle": False})
    found = [load_prompts(files, Words(), max_prompt_tokens=8, **way) for way in ways]
    assert len({one.fingerprint() for one in found}) == len(ways)
    joined = load_prompts(write(tmp_path / "c.txt", "a", "b", "c d"), Words(), max_prompt_tokens=8)
    assert joined.fingerprint() == found[0].fingerprint() and joined.batch(3, 2) == found[0].batch(3, 2)


def test_what_is_wrong_names_its_file(tmp_path):
    good, long = write(tmp_path / "a.txt", "a"), write(tmp_path / "b.jsonl", {"prompt": "a"}, {"prompt": "a b c d"})
    for bad, words in (
        ([good, good], "a.txt twice"),
        ([good, f"{tmp_path}/./a.txt"], "a.txt twice"),
        ([good, write(tmp_path / "empty.jsonl")], "empty.jsonl is empty"),
        ([good, str(tmp_path / "no.jsonl")], "no.jsonl does not exist"),
        ([good, write(tmp_path / "c.jsonl", {"prompt": "a"}, {"promt": 1})], "c.jsonl, line 2: no key 'prompt'"),
        ([good, long], "b.jsonl, line 2: the prompt has 4 tokens"),
    ):
        with pytest.raises(UserError, match=words):
            load_prompts(bad, Words(), max_prompt_tokens=3)
    found = load_prompts([good, long], Words(), max_prompt_tokens=3, long_prompts="drop")
    assert (found.sizes, found.counts["dropped"]) == ((1, 1), 1)
    only = write(tmp_path / "d.txt", "a b c d")
    with pytest.raises(UserError, match="d.txt has no row to learn from: 1 are too long"):
        load_prompts([good, only], Words(), max_prompt_tokens=3, long_prompts="drop")
