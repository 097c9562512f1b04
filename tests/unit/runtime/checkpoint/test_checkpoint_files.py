"""Checkpoints on disk: whole or not there, whatever byte a crash comes at; refused by name when anything is wrong."""

import json
import os
from pathlib import Path

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.checkpoint import checkpoint_files
from rlhf_spmd.runtime.checkpoint.checkpoint_files import (
    MANIFEST,
    Checkpoint,
    checkpoint_folder,
    newest,
    rank_file,
)

TEXTS = {"state.json": "{}", "config.json": "{}", "strategy.py": "def place(): ...\n", rank_file(0): "numbers" * 30}


def write(root: Path, iteration: int, *, keep: int = 2) -> None:
    """Writes a checkpoint with a second rank's file, as the threads of two ranks write it."""
    draft = checkpoint_files.make_draft(root, iteration)
    name = rank_file(1)
    checkpoint_files.say_written(draft, name, checkpoint_files.write(draft / name, [b"others", b"!" * 50]))
    files = {name: checkpoint_files.write(draft / name, [text.encode()]) for name, text in TEXTS.items()}
    files |= checkpoint_files.wait_for(draft, [name], deadline_s=5.0)
    checkpoint_files.commit(root, iteration, files)
    checkpoint_files.keep_newest(root, keep)


@pytest.fixture
def root(tmp_path) -> Path:
    write(tmp_path, 5)
    write(tmp_path, 10)
    return tmp_path


def verified(root: Path) -> Checkpoint | None:
    found = newest(root)
    if found is not None:
        found.verify(found.files)
    return found


def test_the_newest_is_found_and_whole(root):
    found = verified(root)
    assert found.iteration == 10 and found.tensor_files == (rank_file(0), rank_file(1))
    assert found.text("strategy.py") == TEXTS["strategy.py"]
    assert set(found.files) == {*TEXTS, rank_file(1)}
    assert {path.name for path in found.folder.iterdir()} == {*found.files, MANIFEST}
    assert not any(path.stat().st_mode & 0o007 for path in (found.folder, found.folder.parent / "iteration-000005"))


def test_only_the_newest_are_kept(root):
    write(root, 15)
    assert [path.name for path in sorted(root.iterdir())] == ["iteration-000010", "iteration-000015"]


def test_a_whole_one_is_never_replaced(root):
    """Two runs in one folder, on a disk without locks."""
    with pytest.raises(UserError, match="iteration-000010 exists already: another run writes to this folder"):
        write(root, 10)
    assert verified(root).iteration == 10


# ---- a crash ---------------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """Stands for SIGKILL: nobody catches it."""


class Budget:
    """Lets so many bytes and so many other changes of the disk through, each byte and each change a unit."""

    def __init__(self, monkeypatch, units: float):
        self.left = units
        real = {name: getattr(os, name) for name in ("write", "rename", "unlink", "mkdir", "rmdir")}

        def write(descriptor, data):
            part = data[: int(min(len(data), self.left))]
            if len(part):
                real["write"](descriptor, part)
            self._spend(len(data))
            return len(data)

        def counted(name):
            def change(*arguments, **options):
                self._spend(1)
                return real[name](*arguments, **options)

            return change

        monkeypatch.setattr(os, "write", write)
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # which tells a stand-in for a kill nothing
        for name in real.keys() - {"write"}:
            monkeypatch.setattr(os, name, counted(name))

    def _spend(self, units: int) -> None:
        self.left -= units
        if self.left < 0:
            raise Crash


def test_a_crash_at_any_byte_leaves_a_whole_checkpoint(root, monkeypatch, tmp_path_factory):
    with monkeypatch.context() as patch:
        budget = Budget(patch, 10**9)
        write(tmp_path_factory.mktemp("whole"), 15)
        total = 10**9 - budget.left
    assert total > 700
    committed = 0
    for units in range(total + 12):  # and the deletion of the oldest
        with monkeypatch.context() as patch:
            Budget(patch, units)
            try:
                write(root, 15)
                crashed = False
            except Crash:
                crashed = True
        found = verified(root)
        assert found.iteration in (10, 15), units
        for folder in checkpoint_files.complete_checkpoints(root):
            Checkpoint.read(folder).verify(Checkpoint.read(folder).files)
        if found.iteration == 15:
            committed += 1
            assert crashed or not checkpoint_folder(root, 5).exists()
            checkpoint_files._remove(checkpoint_folder(root, 15))
            if not checkpoint_folder(root, 5).exists():
                write(root, 5)
        checkpoint_files.remove_drafts(root)
    assert 0 < committed < 40


# ---- tampering -------------------------------------------------------------------------------------------------------


def edit(root: Path, change) -> Path:
    path = checkpoint_folder(root, 10) / MANIFEST
    values = json.loads(path.read_text(encoding="utf-8"))
    change(values)
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def refused(root: Path) -> str:
    with pytest.raises(UserError) as error:
        verified(root)
    return str(error.value)


def linked(folder: Path) -> None:
    """Moves a file away, and leaves a link to it."""
    (folder / "state.json").rename(folder.parent / "elsewhere")
    (folder / "state.json").symlink_to(folder.parent / "elsewhere")


def test_any_changed_byte_is_found(root):
    folder = checkpoint_folder(root, 10)
    for name in (*TEXTS, rank_file(1)):
        path, whole = folder / name, (folder / name).read_bytes()
        for place in {0, len(whole) // 2, len(whole) - 1}:
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            message = refused(root)
            assert f"{path} is damaged" in message and f"remove {folder} to resume from iteration-000005" in message
        path.write_bytes(whole)
    assert verified(root).iteration == 10


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / rank_file(1)).unlink(), "rank-0001.safetensors is missing"),
        (linked, "state.json is a link"),
    ],
)
def test_a_file_that_is_gone_or_a_link_is_refused(root, change, words):
    change(checkpoint_folder(root, 10))
    assert words in refused(root)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda values: values["files"].update({"../x": "0"}), "can't be read (ValueError: it is not of iteration-"),
        (lambda values: values["files"].update({"..": "0"}), "/.. is missing"),
        (lambda values: values.update(iteration=11), "can't be read (ValueError: it is not of iteration-000010"),
        (lambda values: values.pop("files"), "can't be read (KeyError"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(root, change, words):
    edit(root, change)
    message = refused(root)
    assert words in message and "iteration-000005" in message


def test_without_a_manifest_it_is_no_checkpoint(root):
    (checkpoint_folder(root, 10) / MANIFEST).unlink()
    assert verified(root).iteration == 5
