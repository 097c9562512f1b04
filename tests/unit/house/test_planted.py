"""The faults that `python -m tools planted` plants: each can be planted, and `make test` runs its tests."""

import pytest

from tools.planted.planted import main, read_faults


def test_every_fault_can_be_planted_and_its_tests_are_in_make_test():
    assert [text for fault in read_faults().values() for text in fault.problems()] == []


@pytest.mark.slow  # minutes
def test_make_test_finds_every_fault():
    assert main([]) == 0
