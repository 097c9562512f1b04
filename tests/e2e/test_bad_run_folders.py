"""Run folders and checkpoints of two ranks that a resume must refuse: one message that names the file and the mend, no
traceback, and not a byte of the folder changed. Most are resumed by one rank, one of each kind by two.
test_bad_input.py does the same for options, strategies and prompts."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.folders import write_all
from tests.unchanged import contents

LAST = "checkpoints/iteration-000002"
RANK_FILE = f"{LAST}/rank-0001.safetensors"
OLDER = "to resume from iteration-000001"


def put(run: Path, name: str, content: bytes) -> None:
    """Replaces a file of the last checkpoint, in the manifest too: as whoever changes a checkpoint on purpose would."""
    (run / LAST / name).write_bytes(content)
    manifest = json.loads((run / LAST / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"][name] = hashlib.sha256(content).hexdigest()
    (run / LAST / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def change(run: Path, name: str, edit: Callable[[dict], object]) -> None:
    """Edits a JSON file of the last checkpoint in the same way."""
    values = json.loads((run / LAST / name).read_text(encoding="utf-8"))
    edit(values)
    put(run, name, json.dumps(values).encode())


def cut(run: Path, name: str) -> None:
    whole = (run / name).read_bytes()
    (run / name).write_bytes(whole[: len(whole) // 2])


def flip(run: Path, name: str) -> None:
    whole = bytearray((run / name).read_bytes())
    whole[-100] ^= 1
    (run / name).write_bytes(bytes(whole))


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def edit_manifest(run: Path, edit: Callable[[dict], object]) -> None:
    values = json.loads((run / LAST / "manifest.json").read_text(encoding="utf-8"))
    edit(values)
    (run / LAST / "manifest.json").write_text(json.dumps(values), encoding="utf-8")


def link(run: Path) -> None:
    (run / RANK_FILE).rename(run / "elsewhere")
    os.symlink(run / "elsewhere", run / RANK_FILE)


def other_shapes(run: Path) -> None:
    """Removes one number of one tensor."""
    path = run / RANK_FILE
    tensors = load_file(path)
    name = min(tensors)
    tensors[name] = tensors[name][:-1].clone()
    about = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])["__metadata__"]
    save_file(tensors, path, metadata=about)
    put(run, path.name, path.read_bytes())


CASES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a changed byte": (lambda run: flip(run, RANK_FILE), [RANK_FILE, "is damaged", OLDER]),
    "a missing file": (lambda run: (run / RANK_FILE).unlink(), [RANK_FILE, "is missing", OLDER]),
    "a link": (link, [RANK_FILE, "is a link", OLDER]),
    "no safetensors": (lambda run: put(run, "rank-0001.safetensors", b"\x80\x04pickled"), [RANK_FILE, "can't be read"]),
    "other shapes": (other_shapes, ["can't be read", OLDER]),
    "a path outside": (
        lambda run: edit_manifest(run, lambda values: values["files"].update({"../x": ""})),
        ["manifest.json can't be read", OLDER],
    ),
    "an older layout of random numbers": (
        lambda run: edit_manifest(run, lambda values: values.update(random_layout=1)),
        ["iteration-000002 was written by another version", "or start a new run"],
    ),
    "no controller": (
        lambda run: change(run, "state.json", lambda state: state["state"].pop("kl_coef")),
        ["state.json", OLDER],
    ),
    "an option of a later version": (
        lambda run: change(run, "config.json", lambda config: config.update(novelty=1)),
        ["config.json has the option novelty, which this version does not know"],
    ),
    "half a config": (lambda run: cut(run, "config.json"), ["config.json", "JSON"]),
    "no strategy": (lambda run: (run / "strategy.py").unlink(), ["is not a run folder", "strategy.py does not exist"]),
    "half a strategy": (
        lambda run: (run / "strategy.py").write_text("def place(workload, cluster:\n", encoding="utf-8"),
        ["strategy", "SyntaxError"],
    ),
    "a checkpoint of another run": (
        lambda run: rewrite(run / "config.json", '"seed": 0', '"seed": 1'),
        ["seed=1 would change the results of", "which has 0"],
    ),
    "metrics lost": (
        lambda run: (run / "metrics.jsonl").write_text("", encoding="utf-8"),
        ["metrics.jsonl has 0 of the 2 iterations"],
    ),
}


ON_TWO_RANKS = ("a changed byte", "other shapes", "metrics lost")  # found by one, by several, in the run folder
QUICK = (*ON_TWO_RANKS, "no safetensors", "no controller", "no strategy")  # one of each kind


@pytest.fixture(scope="module")
def finished(warm, tmp_path_factory) -> Path:
    """Returns a run of two iterations on two ranks, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("runs")
    options = [*write_all(folder), "iterations=2", "checkpoint.every=1", "num_samples=0", "--runs", folder]
    status, _, stderr = warm.run(["train", *options, "--name", "finished"], 2)
    assert status == 0, stderr
    return folder / "finished"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_one_message_and_nothing_changed(name, finished, warm, tmp_path):
    spoil, says = CASES[name]
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    spoil(run)
    before = contents(run)
    status, stdout, stderr = warm.run(["train", "--resume", run, "iterations=3"], 2 if name in ON_TWO_RANKS else 0)
    assert status not in (0, None), stdout + stderr
    assert stderr.count("rlhf_spmd: error:") == 1, stderr
    assert "Traceback" not in stdout + stderr
    for words in says:
        assert words in stderr, f"{words!r} is not in:\n{stderr}"
    assert contents(run) == before
