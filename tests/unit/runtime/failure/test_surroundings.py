"""What a rank needs from its machine is compared with what it has, and what is missing is named."""

import os
import resource

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.failure import failures, surroundings
from rlhf_spmd.runtime.world import devices


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


def test_variables_of_torch_that_have_a_wrong_value_are_named(monkeypatch):
    error = RuntimeError("makeDeviceForInterface(): unsupported gloo device")
    assert not failures.is_peer_error(error) and "check GLOO_DEVICE_TRANSPORT" in failures.explain(error)

    def load(name, *_):
        raise ValueError("The value of TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL.")

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("builtins.__import__", load)
    with pytest.raises(UserError, match="torch can't be loaded: The value of TORCH_DISTRIBUTED_DEBUG must be"):
        devices.import_torch(1, 1)
