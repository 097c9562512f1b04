"""Curves on Weights & Biases, by its own package in its offline mode, and on MLflow and trackio where these packages
are installed; what is said where they can't be written."""

import errno
import json
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.records.loggers import MLFLOW_ID, TRACKIO_ID, WANDB_ID, Curves


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path_factory):
    """Makes a user whom Weights & Biases does not know."""
    home = tmp_path_factory.mktemp("home")
    for name, value in {"HOME": home, "NETRC": home / "netrc", "WANDB_CONFIG_DIR": home}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


def draw(folder: Path, *steps: int, tracker: str = "wandb") -> str:
    curves = Curves(folder, [])
    logging = SimpleNamespace(entity="a-team", group="a-group", tags=("one tag", "two"))
    projects = dict.fromkeys(("wandb", "mlflow", "trackio"), "") | {tracker: "a-project"}
    (place,) = curves.start_trackers(SimpleNamespace(logging=logging, **projects), {"seed": 3})
    for step in steps:
        curves.add(step, {"reward/reward": step / 4})
    curves.close()
    return place.partition(": ")[2]


def draw_apart(folder: Path, *steps: int, tracker: str = "wandb") -> subprocess.CompletedProcess:
    """Draws in a process of its own: the package puts hooks into the interpreter and reads its environment once."""
    code = "from pathlib import Path\nfrom tests.unit.runtime.records.test_loggers import draw\n"
    code += f"print(draw(Path({str(folder)!r}), *{steps}, tracker={tracker!r}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=120)


def test_a_resumed_run_has_the_same_id(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    places = [draw_apart(tmp_path, *steps).stdout.strip() for steps in ((0, 1), (1, 2))]
    name = (tmp_path / WANDB_ID).read_text(encoding="utf-8")
    assert re.fullmatch("[0-9a-f]{16}", name)
    for place in places:
        (run,) = Path(place).parent.glob(f"run-{name}.wandb")
        told = (b"reward/reward", b"a-project", b"0.25", b"a-team", b"a-group", b"one tag", b"two")
        assert all(part in run.read_bytes() for part in told)
        assert [*tmp_path.glob("events.out.tfevents.*")], "TensorBoard has the same curves"


def test_a_user_who_is_not_logged_in(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    said = draw_apart(tmp_path).stderr
    assert re.search("UserError: wandb=a-project: .* can't be used .*run `wandb login`, or set WANDB_MODE", said), said


@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "trackio"])
def test_without_the_package(tracker, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, tracker, None)
    with pytest.raises(UserError, match=f"{tracker}=a-project needs the package {tracker} .*: pip install {tracker}"):
        draw(tmp_path, tracker=tracker)


def test_mlflow_has_curves_and_options(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri := (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    first, second = (draw_apart(tmp_path, *steps, tracker="mlflow") for steps in ((0, 1), (1, 2)))
    name = (tmp_path / MLFLOW_ID).read_text(encoding="utf-8")
    assert first.stdout == second.stdout == f"run {name} of {uri}\n", first.stderr
    client = mlflow.MlflowClient()
    run = client.get_run(name)
    assert run.data.params == {"seed": "3"} and run.info.status == "FINISHED"
    assert {"group", "one tag", "two"} < set(run.data.tags)
    points = [(point.step, point.value) for point in client.get_metric_history(name, "reward/reward")]
    assert sorted(set(points)) == [(0, 0.0), (1, 0.25), (2, 0.5)]


def test_trackio_has_curves(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    first, second = (draw_apart(tmp_path, *steps, tracker="trackio") for steps in ((0, 1), (1, 2)))
    name = (tmp_path / TRACKIO_ID).read_text(encoding="utf-8")
    assert first.stdout == second.stdout == f"trackio show --project a-project, run {name}\n", first.stderr
    with closing(sqlite3.connect(tmp_path / "trackio" / "a-project.db")) as kept:
        rows = kept.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
    points = {(step, json.loads(text)["reward/reward"]) for run, step, text in rows if run == name}
    assert points == {(0, 0.0), (1, 0.25), (2, 0.5)}


class Broken:
    """Fails at everything, as a service may."""

    def add(self, step, values):
        raise ConnectionError("the service has gone")


def test_a_run_goes_on_without_curves(tmp_path, monkeypatch):
    """Both kinds of curves end, each with one note; the thread of TensorBoard shows no traceback besides."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    notes: list[str] = []
    shown: list[object] = []
    monkeypatch.setattr("threading.excepthook", shown.append)
    curves = Curves(tmp_path, notes)
    curves.add(0, {"reward/reward": 1.0})
    assert [*tmp_path.glob("events.out.tfevents.*")]
    monkeypatch.setattr("tensorboard.summary.writer.record_writer.RecordWriter.write", full)
    curves._writers["Weights & Biases"] = Broken()
    for iteration in (1, 2):
        curves.add(iteration, {"reward/reward": 1.0})
    curves.close()
    assert len(notes) == 2 and not shown, (notes, shown)
    assert notes[0].startswith("no curves for TensorBoard since iteration 2: OSError: [Errno 28] No space left")
    assert notes[1] == "no curves for Weights & Biases since iteration 2: ConnectionError: the service has gone"
