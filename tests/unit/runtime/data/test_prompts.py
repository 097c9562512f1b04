"""Prompt files: what is read, what is refused and in which words, and the order in which prompts are used."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.data.packed_rows import TextRows, TokenRows
from rlhf_spmd.runtime.data.prompts import PromptSet, load_prompts


class Words:
    """A tokenizer: a token per word (its length); `bos` in front if asked."""

    def __init__(self, bos=None):
        self.bos_token_id = bos

    def encode(self, text, *, special=True):
        first = [] if self.bos_token_id is None or not special else [self.bos_token_id]
        return first + [len(word) for word in text.split()]

    def decode(self, ids):
        return " ".join("x" * number for number in ids)


def load(path, *, limit=8, tokenizer=None, **options):
    return load_prompts(path, tokenizer or Words(), max_prompt_tokens=limit, **options)


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refusal(path, **options):
    with pytest.raises(UserError) as caught:
        load(path, **options)
    message = str(caught.value)
    assert path.name in message
    return message


# ---- reading


def test_jsonl_text_and_parquet_give_the_same_prompts(tmp_path):
    texts = ["one three", "später 'n \\n literal", "four five six"]
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"question": texts, "other": [1, 2, 3]}), tmp_path / "p.parquet")
    lines = [json.dumps({"question": text, "other": 1}) for text in texts]
    jsonl = write(tmp_path, "p.jsonl", "\ufeff" + "\r\n".join(lines) + "\r\n\n \n")
    text = write(tmp_path, "p.TXT", "\n".join(texts) + "\n")
    sets = [load(path, key="question") for path in (jsonl, text, tmp_path / "p.parquet")]
    for prompts in sets:
        assert prompts.texts == texts
        assert prompts.prompts == [Words().encode(text) for text in texts]
    assert len({prompts.fingerprint() for prompts in sets}) == 1
    assert len(sets[0]) == 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a"', ["line 2", "not valid JSON", "column"]),
        ('{"prompt": ' + "9" * 5000 + "}", ["line 2", "not valid JSON"]),
        ("[" * 100_000, ["line 2", "not valid JSON"]),
        ('["a"]', ["line 2", "a list", "object"]),
        ('{"promt": "a", "id": 3}', ["line 2", "no key 'prompt'", "'promt', 'id'"]),
        ('{"prompt": 3}', ["line 2", "a number", "not a string"]),
        ('{"prompt": null}', ["line 2", "the value of 'prompt' is null", "give it a value"]),
        ('{"prompt": true}', ["line 2", "a boolean"]),
        ('{"prompt": [{"role": "user"}]}', ["line 2", "message 1 of 'prompt'", '{"role": "...", "content": "..."}']),
        ('{"prompt": []}', ["line 2", "'prompt' has no message"]),
        ('{"messages": "a"}', ["line 2", "'messages' is a string", "not a list of messages"]),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', ["line 2", "no message before the assistant's"]),
        ('{"messages": [{"role": "user", "content": "a"}]}', ["line 2", "only a string can be read here"]),
        ('{"prompt": " \\n"}', ["line 2", "the value of 'prompt' is empty"]),
        ('{"prompt": "a\\ud83d"}', ["line 2", "surrogate", "character 2"]),
        ("", ["line 2", "blank"]),
        (b'{"prompt": "\xff"}', ["line 2", "not UTF-8", "byte 13"]),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path, line, words):
    line = line if isinstance(line, bytes) else line.encode()
    message = refusal(write(tmp_path, "p.jsonl", b'{"prompt": "a"}\n' + line + b'\n{"prompt": "b"}\n'))
    for word in words:
        assert word in message


def test_files_that_cannot_be_used(tmp_path):
    assert "is empty" in refusal(write(tmp_path, "empty.jsonl", ""))
    assert "is empty" in refusal(write(tmp_path, "blank.txt", "\n \n"))
    assert "line 2" in refusal(write(tmp_path, "gap.txt", "a\n\nb\n"))
    assert ".jsonl, .json, .csv, .txt, .parquet" in refusal(write(tmp_path, "p.tsv", "a"))
    assert "does not exist" in refusal(tmp_path / "absent.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    assert "folder.jsonl has no data" in refusal(tmp_path / "folder.jsonl")
    mute = type("Mute", (Words,), {"encode": lambda *_, **__: []})()
    assert "line 1" in refusal(write(tmp_path, "p.txt", "a"), tokenizer=mute)


def test_conversations_are_rendered_without_the_last_answer_and_further_columns_are_kept(tmp_path):
    user, answer = {"role": "user", "content": "hello you"}, {"role": "assistant", "content": "four"}
    rows = [
        {"prompt": [user], "answer": "4", "extra_info": {"index": 3}},
        {"messages": [user, answer], "answer": "5"},
        {"prompt": "a b"},
    ]
    path = write(tmp_path, "p.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())

    def render(where, messages):
        return "|".join(f"{one['role']} {one['content']}" for one in messages) + "| assistant"

    found = load(path, tokenizer=Words(bos=9), render=render)
    assert list(found.texts) == ["user hello you| assistant"] * 2 + ["a b"]
    assert list(found.prompts) == [[4, 5, 4, 9]] * 2 + [[9, 1, 1]]  # a template begins the sequence itself
    assert found.records([2, 0]) == [{}, rows[0]] and found.records([1]) == [rows[1]]
    assert found.column_names == ("prompt", "answer", "extra_info", "messages")  # of all rows
    assert load(write(tmp_path, "q.jsonl", b'{"prompt": "a"}\n')).columns is None


# ---- long prompts


def test_long_prompts_are_an_error_unless_told(tmp_path):
    path = write(tmp_path, "p.txt", "a\na b c d\na b\na b c d e\n")
    message = refusal(path, limit=3)
    for word in ("line 2", "4 tokens", "limit is 3", "2 prompts", "(to 5)", "truncate", "drop"):
        assert word in message


def test_long_prompts_dropped(tmp_path):
    path = write(tmp_path, "p.txt", "a\na b c d\nab b\n")
    prompts = load(path, limit=3, long_prompts="drop")
    assert prompts.texts == ["a", "ab b"] and (prompts.counts["dropped"], prompts.counts["truncated"]) == (1, 0)
    assert "1 are too long" in refusal(write(tmp_path, "q.txt", "a b c d"), limit=3, long_prompts="drop")


def test_long_prompts_truncated_keep_the_end_and_the_first_token_if_it_is_special(tmp_path):
    path = write(tmp_path, "p.txt", "x\nx xx xxx xxxx\n")
    prompts = load(path, limit=3, long_prompts="truncate")
    assert prompts.prompts == [[1], [2, 3, 4]] and prompts.texts == ["x", "xx xxx xxxx"]
    assert (prompts.counts["dropped"], prompts.counts["truncated"]) == (0, 1)
    prompts = load(path, limit=3, long_prompts="truncate", tokenizer=Words(bos=0))
    assert prompts.prompts == [[0, 1], [0, 3, 4]] and prompts.texts[1] == "xxx xxxx"
    assert load(path, limit=1, long_prompts="truncate", tokenizer=Words(bos=0)).prompts == [[1], [4]]


# ---- order


def prompt_set(size, seed=0):
    numbers = range(size)
    return PromptSet(TokenRows.of([[number] for number in numbers]), TextRows.of(map(str, numbers)), seed)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 60), st.integers(-3, 2**70), st.data())
def test_every_epoch_is_a_permutation_and_no_batch_repeats(size, rollout_batch, seed, data):
    prompts = prompt_set(size, seed)
    batches = [prompts.batch(iteration, rollout_batch) for iteration in range(2 * size // rollout_batch + 4)]
    flat = [index for batch in batches for index in batch]
    for start in range(0, len(flat) - size + 1, size):
        assert sorted(flat[start : start + size]) == list(range(size))
    for batch in batches:
        assert len(batch) == rollout_batch
        if rollout_batch <= size:
            assert len(set(batch)) == rollout_batch
    iteration = data.draw(st.integers(0, len(batches) - 1))
    assert prompt_set(size, seed).batch(iteration, rollout_batch) == batches[iteration]  # no history needed
    assert prompts.batch(iteration, rollout_batch) == batches[iteration]  # nor does history harm
