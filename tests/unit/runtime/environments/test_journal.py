"""The journal: lines of all ranks, torn ends, damaged lines, and what a checkpoint covers."""

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.environments.journal import Journal, forget


def test_answers_are_found_over_all_ranks_and_the_first_one_counts(tmp_path):
    one, other = Journal(tmp_path, 3, 0), Journal(tmp_path, 3, 1)
    one.ask((0, 0, 1, 0))
    one.add((0, 0, 1, 0), {"x": "é\n"})
    other.ask((1, 0, 1, 0))
    other.add((0, 0, 1, 0), {"x": 2})
    later = Journal(tmp_path, 3, 7)
    assert later.answers == {(0, 0, 1, 0): {"key": [0, 0, 1, 0], "x": "é\n"}}
    assert later.asked == {(0, 0, 1, 0), (1, 0, 1, 0)}
    for another in (Journal(tmp_path, 4, 0), Journal(tmp_path, 3, 0, "evaluation"), Journal(tmp_path, 33, 0)):
        assert not another.answers


@pytest.mark.parametrize("torn", [b'{"key"', b"{", b'{"key": [0, 0, 2, 0], "x": 1}'])
def test_a_torn_last_line_was_never_used(torn, tmp_path):
    journal = Journal(tmp_path, 1, 0)
    journal.add((0, 0, 1, 0), {"x": 1})
    journal.close()
    with journal.path.open("ab") as file:
        file.write(torn)
    assert {*Journal(tmp_path, 1, 5).answers} == {(0, 0, 1, 0)}  # of another rank, which leaves the file as it is
    assert journal.path.read_bytes().endswith(torn)
    again = Journal(tmp_path, 1, 0)
    again.add((0, 0, 2, 0), {"x": 2})
    assert Journal(tmp_path, 1, 1).answers[0, 0, 2, 0]["x"] == 2


def test_a_damaged_line_is_named(tmp_path):
    journal = Journal(tmp_path, 1, 0)
    journal.add((0, 0, 1, 0), {"x": 1})
    with journal.path.open("ab") as file:
        file.write(b"nonsense\n")
    with pytest.raises(UserError, match="rollout-1-rank0.jsonl, line 2 is damaged"):
        Journal(tmp_path, 1, 1)


def test_files_that_a_checkpoint_covers_are_removed(tmp_path):
    for iteration in (1, 2, 10):
        Journal(tmp_path, iteration, 0).close()
    Journal(tmp_path, 9, 0, "iteration-actor_generate").close()
    (tmp_path / "other.jsonl").touch()
    forget(tmp_path, 10)
    assert {path.name for path in tmp_path.iterdir()} == {"rollout-10-rank0.jsonl", "other.jsonl"}
