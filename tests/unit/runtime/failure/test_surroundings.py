"""What a rank needs from its machine is compared with what it has, and what is missing is named."""

import os
import resource

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


def test_the_limit_of_open_files_is_raised_or_named(monkeypatch):
    limits = []
    monkeypatch.setattr("psutil.Process.num_fds", lambda _: 30)
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 4096))
    surroundings.raise_open_files(126)
    assert limits == [(4096, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))
    with pytest.raises(UserError, match=r"the limit of open files on .* is 40 \(`ulimit -n`\).* up to 200: raise"):
        surroundings.raise_open_files(126)
