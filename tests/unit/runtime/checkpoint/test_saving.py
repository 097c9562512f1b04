"""The thread that writes checkpoints, and the signals that ask for them."""

import errno
import os
import threading
from types import SimpleNamespace

import pytest

from rlhf_spmd.config.options import Checkpointing
from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.checkpoint import checkpoint_files, saving
from rlhf_spmd.runtime.checkpoint.checkpoint_files import newest
from rlhf_spmd.runtime.checkpoint.saving import Saver
from tests.runs import OneRank

TEXTS = {"config.json": "{}", "strategy.py": ""}


@pytest.fixture
def saver(tmp_path, monkeypatch) -> Saver:
    """Makes the saver of a rank with nothing but small files to write."""
    monkeypatch.setattr(saving, "collect", lambda models: ({}, {"places": "{}", "steps": "{}"}))
    world = OneRank()
    world.deadline_s = 5.0
    options = SimpleNamespace(checkpoint=Checkpointing(every=4, keep=2))
    program = SimpleNamespace(trained=lambda rank: ("actor",), placement=SimpleNamespace(ahead=0))
    parts = {"config": options, "program": program, "world": world, "models": None, "environments": None}
    return Saver(SimpleNamespace(**parts), tmp_path, TEXTS)


def test_the_loop_does_not_wait_for_the_disk(saver, monkeypatch):
    go, real = threading.Event(), checkpoint_files.commit

    def slow(*arguments):
        go.wait(10)
        return real(*arguments)

    monkeypatch.setattr(checkpoint_files, "commit", slow)
    saver.save(4, {"kl_coef": 1.0})
    saver.check()
    assert newest(saver.root) is None
    go.set()
    saver.finish()
    found = newest(saver.root)
    assert found.iteration == 4 and '"kl_coef": 1.0' in found.text("state.json")


def test_a_full_disk_is_told_by_the_next_check(saver, monkeypatch):
    saver.save(4, {})
    saver.finish()

    def full(descriptor, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    saver.save(8, {})
    with pytest.raises(UserError, match="rank-0000.safetensors can't be written: No space left.*checkpoint.keep"):
        saver.finish()
    with pytest.raises(UserError):
        saver.check()
    monkeypatch.undo()
    assert newest(saver.root).iteration == 4
