"""The commit and the versions that a run records."""

import subprocess

from rlhf_spmd.runtime.records.software import commit


def git(folder, *words: str) -> str:
    told = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words]
    return subprocess.run(told, cwd=folder, check=True, capture_output=True, encoding="utf-8").stdout.strip()


def test_the_commit_of_a_checkout(tmp_path):
    assert commit(tmp_path) == "", "a folder that is none, though it may lie within one"
    git(tmp_path, "init", "-q")
    assert commit(tmp_path) == ""
    (tmp_path / "rlhf_spmd").mkdir()
    for name in ("rlhf_spmd/code.py", "notes.txt"):
        (tmp_path / name).write_text("1", encoding="utf-8")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    short = git(tmp_path, "rev-parse", "--short", "HEAD")
    (tmp_path / "notes.txt").write_text("2", encoding="utf-8")
    assert commit(tmp_path, ("rlhf_spmd",)) == short, "notes are no code"
    (tmp_path / "rlhf_spmd" / "code.py").write_text("2", encoding="utf-8")
    assert commit(tmp_path, ("rlhf_spmd",)) == f"{short}-dirty"
