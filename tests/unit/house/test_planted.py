"""The faults that `python -m tools planted` plants: each can be planted, and `make test` runs its tests."""

from dataclasses import replace

import pytest

from tools.planted.planted import Fault, main, read_faults

FILE = "tests/unit/house/test_planted.py"
GOOD = Fault("good", "rlhf_spmd/algorithms/masks.py", "return responses_BG >= 0", "return responses_BG > 0", (FILE,))


def test_every_fault_can_be_planted_and_its_tests_are_in_make_test():
    assert [text for fault in read_faults().values() for text in fault.problems()] == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"old": "return responses_BG > 1"}, "occurs 0 times"),
        ({"old": "responses_BG"}, "and must occur once"),
        ({"tests": (f"{FILE}::test_of_nothing",)}, "does not exist"),
        ({"tests": ("tests/unit/house/test_of_nothing.py",)}, "does not exist"),
        ({"tests": (FILE, f"{FILE}::test_make_test_finds_every_fault")}, "or `make test` leaves it out"),
        ({"tests": ("tests/mpi/test_communicators.py",), "ranks": 2}, "or `make test` leaves it out"),
    ],
)
def test_what_cannot_be_planted_or_found_is_told(change, says):
    assert list(GOOD.problems()) == []
    (text,) = replace(GOOD, **change).problems()
    assert text.startswith("good: ") and says in text


@pytest.mark.slow  # minutes
def test_make_test_finds_every_fault():
    assert main([]) == 0
