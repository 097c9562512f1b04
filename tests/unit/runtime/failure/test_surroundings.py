"""What a rank needs from its machine is compared with what it has, and what is missing is named."""

import os

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.failure import surroundings


def test_a_working_folder_that_is_gone(monkeypatch):
    surroundings.check_folder()

    def gone() -> str:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "getcwd", gone)
    with pytest.raises(UserError, match="the working folder is gone .No such file or directory.*`cd` into one"):
        surroundings.check_folder()
