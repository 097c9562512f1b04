"""The run folder: what is written where, and never twice."""

import json
import math
import shutil
import subprocess
import sys

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.algorithm import load_algorithm
from rlhf_spmd.runtime.records.run_folder import RunFolder, Sample
from rlhf_spmd.runtime.run.metrics import metrics_of

PPO = load_algorithm("ppo")
WORKFLOW = PPO.workflow(PPO.options())
METRICS = metrics_of(PPO, WORKFLOW)
GROUPS = {name: metric.group for name, metric in METRICS.items()}
SAMPLES = [
    Sample(3, "The film was", " bad\x1b[2J\n" + "so bad " * 30, -0.5, " good", 0.75),
    Sample(8, "", "", 0.0),
]


# ---- the folder


def test_names_are_made_and_never_reused(tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda form: "20250102-030405")
    root = tmp_path / "deep" / "runs"
    names = [RunFolder.create(root, strategy="strategies/my strategy.py").path.name for _ in range(3)]
    stem = "20250102-030405-my-strategy"
    assert names == [stem, f"{stem}-2", f"{stem}-3"]
    mine = RunFolder.create(root, strategy="flattening", name="mine")
    assert mine.path == root / "mine"
    mine.write_values("config.json", {})
    with pytest.raises(UserError, match="mine exists already and .* with --resume .*mine"):
        RunFolder.create(root, strategy="flattening", name="mine")
    assert [entry.name for entry in mine.path.iterdir()] == ["config.json"]
    mine.lock()
    with pytest.raises(UserError, match="is in use by another run"):
        RunFolder.create(root, strategy="flattening", name="mine")


def test_a_name_whose_run_was_killed_before_it_began_is_free(tmp_path):
    """A job that is put back into the queue comes with its name again, and there is nothing to resume."""
    first = RunFolder.create(tmp_path, strategy="flattening", name="job-1")
    first.lock()
    first.write("strategy.py", "")
    (first.path / ".config.json.12").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="is in use by another run"):  # which still writes
        RunFolder.create(tmp_path, strategy="flattening", name="job-1")
    assert (first.path / ".config.json.12").is_file()
    first._lock.close()  # killed
    for name in (".config.json.123", ".strategy.py.123", ".program.json.45", ".cluster.toml.6"):
        (first.path / name).write_text("{", encoding="utf-8")
        assert RunFolder.create(tmp_path, strategy="flattening", name="job-1").path == first.path
    assert {path.name for path in first.path.iterdir()} == {".lock", "strategy.py"}
    (first.path / "notes.txt").write_text("somebody else's", encoding="utf-8")
    first.lock()
    with pytest.raises(UserError, match="is in use by another run"):  # the first one has locked it
        RunFolder.create(tmp_path, strategy="flattening", name="job-1")


def test_a_folder_that_other_hosts_do_not_see_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf_spmd.runtime.records.run_folder.FIND_S", 0.05)
    RunFolder(tmp_path).find()
    with pytest.raises(UserError, match="nowhere is not there on .*: put it on a disk that all hosts share"):
        RunFolder(tmp_path / "nowhere").find()


def test_metrics_are_on_disk_after_every_iteration(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_metrics(1, {"reward": 0.5, "policy_loss": math.nan, "mine": 3, "hash": "abc"}, GROUPS)
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0]) == {"iteration": 1, "reward": 0.5, "policy_loss": None, "mine": 3, "hash": "abc"}
    folder.write_metrics(2, {"reward": 0.75, "kl": math.inf}, GROUPS)
    folder.close()
    folder.close()
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[1]) == {"iteration": 2, "reward": 0.75, "kl": None}
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/reward")] == [(1, 0.5), (2, 0.75)]
    assert events.Scalars("other/mine")[0].value == 3 and "policy/policy_loss" in events.Tags()["scalars"]
    assert folder.notes == []


def test_a_folder_that_goes_away_is_named(tmp_path):
    folder = RunFolder.create(tmp_path, strategy="flattening", name="run")
    shutil.rmtree(folder.path)
    with pytest.raises(UserError, match=f"the run folder {folder.path} is gone.*start the run again"):
        folder.write("strategy.py", "")


@pytest.mark.parametrize("begun", [False, True])
def test_a_folder_that_is_replaced_is_noticed(begun, tmp_path):
    folder = RunFolder.create(tmp_path, strategy="flattening", name="run")
    folder.lock()
    if begun:
        folder.write_metrics(0, {"reward": 0.5})
    shutil.rmtree(folder.path)
    other = RunFolder.create(tmp_path, strategy="flattening", name="run")
    other.lock()
    other.write_metrics(0, {"reward": 0.5})
    with pytest.raises(UserError, match=f"the run folder {folder.path} is gone.*start the run again"):
        folder.write_metrics(1, {"reward": 0.5})


def test_other_ranks_write_nothing(tmp_path):
    folder = RunFolder(tmp_path, writes=False)
    folder.write_values("config.json", {})
    folder.write("strategy.py", "")
    folder.write_metrics(1, {"reward": 0.5})
    folder.write_samples(SAMPLES)
    folder.write_timeline([], title="t", workflow=WORKFLOW)
    folder.close()
    assert not list(tmp_path.iterdir())


def test_a_killed_run_leaves_whole_files(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.write_samples(SAMPLES[:1])
    before = (tmp_path / "samples.jsonl").read_text(encoding="utf-8")
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        folder.write_samples(SAMPLES)
    assert (tmp_path / "samples.jsonl").read_text(encoding="utf-8") == before


def test_imports_are_late():
    code = (
        "import sys, rlhf_spmd.runtime.records.run_folder, rlhf_spmd.runtime.records.console\n"
        "import rlhf_spmd.runtime.data.prompts, rlhf_spmd.runtime.rewards.function, rlhf_spmd.rewards\n"
        "late = {'torch', 'matplotlib', 'tensorboard', 'pyarrow', 'rich', 'vaderSentiment'} & set(sys.modules)\n"
        "assert not late, late"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_metrics_of_ppo_keep_their_names_and_curves():
    """Whoever compares runs finds the same curves in all of them."""
    by_group = {
        "reward": "reward reward_std score score_std kl kl_per_token kl_coef reward_timeouts",
        "policy": "policy_loss clip_fraction entropy ratio approx_kl approx_kl_sq importance_weight rejected "
        "importance_max importance_truncated importance_ess generator_clip_fraction",
        "value": "value_loss value_clip_fraction value_error_sq value return",
        "optimizer": "actor_grad_norm critic_grad_norm actor_lr critic_lr expert_load router_balance router_z "
        "router_entropy",
        "generation": "response_length ended_fraction parity_max_abs parity_mean_abs route_disagreement "
        "lag lag_tokens held_groups lag_max_abs lag_mean_abs gen_tokens failed_groups prompts_used",
        "speed": "gen_tokens_per_s moved_bytes moved_messages generate_s tflops mfu peak_bytes iteration_s",
    }
    assert {name: group for group, names in by_group.items() for name in names.split()} == GROUPS
    columns = [metric.column for metric in METRICS.values() if metric.column]
    assert columns == ["reward", "kl", "length", "policy", "clipped", "value", "timeouts", "gen tok/s", "seconds"]


def test_a_resumed_run_drops_what_it_does_again(tmp_path):
    folder = RunFolder(tmp_path)
    for iteration in range(4):
        folder.write_metrics(iteration, {"reward": float(iteration)})
    folder.close()
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"iteration": 4, "rew')  # killed
    again = RunFolder(tmp_path)
    rows = again.metrics(2)
    assert [row["reward"] for row in rows] == [0.0, 1.0]
    again.keep_metrics(rows)
    again.write_metrics(2, {"reward": 7.0})
    again.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(row["iteration"], row["reward"]) for row in rows] == [(0, 0.0), (1, 1.0), (2, 7.0)]


def test_nobody_else_runs_in_a_locked_folder(tmp_path):
    first = RunFolder(tmp_path)
    first.lock()
    with pytest.raises(UserError, match="is in use by another run"):
        RunFolder(tmp_path).lock()
    RunFolder(tmp_path, writes=False).lock()
