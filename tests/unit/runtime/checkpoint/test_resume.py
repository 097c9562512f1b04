"""What a resumed run reads before it starts: its options, what may change in them, and the state between iterations."""

import json
from pathlib import Path

import pytest

from rlhf_spmd.algorithms import ppo
from rlhf_spmd.algorithms.controllers import RunningMoments
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import resolved
from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.option_tree import with_value
from rlhf_spmd.runtime.checkpoint import checkpoint_files
from rlhf_spmd.runtime.checkpoint.resume import (
    read_run,
    refuse_changes,
    refuse_older,
    refuse_other_inputs,
)
from rlhf_spmd.runtime.execute.job import RunState
from rlhf_spmd.runtime.run import recorded

MOMENTS = {"count": 3.0, "mean": 0.1, "squares": 2.5}
OF_PPO = {"kl_coef": 0.1, "score_moments": MOMENTS, "value_moments": MOMENTS}
ABOUT = {"inputs": {"prompts in x": "abc"}, "surroundings": {"torch": "2.11"}}
STATE = {"state": OF_PPO, "ahead": 0} | ABOUT

MAY_CHANGE = {"deadline_s", "device", "device_type", "parity_tolerance", "wandb", "mlflow", "trackio", "micro_batch"}
MAY_CHANGE |= {"reward_workers", "reward_timeout_s", "environment_workers", "data.epochs", "episode.on_failure"}
MAY_CHANGE |= {"forecast_lengths", "forecast_episodes", "forecast_failed_groups"}
MAY_CHANGE |= {f"generation.{name}" for name in ("max_sequences", "block_size", "cache_fraction")}
MAY_CHANGE |= {"eval.every", "eval.at_start", "eval.patience", "rollouts.every", "rollouts.format"}


def write_run(folder: Path, *overrides: str, iteration: int | None = 2, state: object = STATE) -> Path:
    """Writes a run folder as a run with these options leaves it."""
    values = json.dumps(resolved(presets.load("tiny", overrides)))
    (folder / "config.json").write_text(values, encoding="utf-8")
    (folder / "strategy.py").write_text("def place(): ...\n", encoding="utf-8")
    (folder / "program.json").write_text(json.dumps({"strategy": "mine"}), encoding="utf-8")
    if iteration is not None:
        draft = checkpoint_files.make_draft(folder / "checkpoints", iteration)
        texts = {"config.json": values, "strategy.py": "", "state.json": json.dumps(state)}
        texts["rank-0000.safetensors"] = ""
        files = {name: checkpoint_files.write(draft / name, [text.encode()]) for name, text in texts.items()}
        checkpoint_files.commit(folder / "checkpoints", iteration, files)
    return folder


def resumed(folder: Path, *overrides: str, other_strategy: bool = False):
    return read_run(str(folder), overrides, other_strategy=other_strategy)


def refused(folder: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as error:
        resumed(folder, *overrides)
    return str(error.value)


def test_a_run_and_its_checkpoint(tmp_path):
    run = resumed(write_run(tmp_path, "iterations=7"), "deadline_s=5", "checkpoint.keep=3")
    assert (run.iteration, run.strategy, run.config.iterations, run.config.deadline_s) == (2, "mine", 7, 5.0)
    assert run.state == STATE and run.config.checkpoint.keep == 3
    assert len(run.notes) == 1 and run.notes[0].endswith(f"code that {tmp_path} holds or names: strategy.py")


def test_every_option_may_change_or_is_refused_by_name():
    before = presets.load("tiny")
    for key in presets.all_keys():
        if key in ("preset", "shape", "strategy", "iterations"):
            continue
        after = with_value(before, key, "another")
        if key in MAY_CHANGE or key.startswith(("checkpoint.", "logging.")):
            refuse_changes(before, after, "RUN")
            continue
        with pytest.raises(UserError, match=f"^{key}=another would change the results of RUN"):
            refuse_changes(before, after, "RUN")


def test_what_a_folder_was_edited_to_is_refused_too(tmp_path):
    """The checkpoint knows what it was made with."""
    values = json.loads((write_run(tmp_path) / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(values | {"seed": 5}), encoding="utf-8")
    assert "seed=5 would change the results of" in (text := refused(tmp_path)) and "which has 0" in text


def test_iterations_may_change_where_no_schedule_depends_on_them(tmp_path):
    assert resumed(write_run(tmp_path), "iterations=20").config.iterations == 20
    assert "has done 2; give iterations=2 or more" in refused(tmp_path, "iterations=1")


def test_iterations_of_a_schedule_stay(tmp_path):
    write_run(tmp_path, "optimizer.schedule=cosine")
    message = refused(tmp_path, "iterations=20")
    assert "every learning rate" in message and "cosine ends after 15" in message


def test_another_strategy_forgets_the_options_of_the_first(tmp_path):
    write_run(tmp_path, "strategy.zero=1")
    assert resumed(tmp_path).config.strategy == {"zero": "1"}
    assert resumed(tmp_path, "strategy.zero=2").config.strategy == {"zero": "2"}
    assert resumed(tmp_path, "strategy.tp=2", other_strategy=True).config.strategy == {"tp": "2"}


def test_without_a_checkpoint_options_are_still_fixed(tmp_path):
    run = resumed(write_run(tmp_path, iteration=None))
    assert run.iteration == 0 and run.state == {} and "starts again" in run.notes[0]
    assert "seed=3 would change the results" in refused(tmp_path, "seed=3")


@pytest.mark.parametrize(
    "state",
    [
        [],
        {},
        ABOUT,
        STATE | {"state": {}},
        STATE | {"state": 3},
        STATE | {"state": OF_PPO | {"kl_coef": "much"}},
        STATE | {"state": OF_PPO | {"score_moments": {"count": "x"}}},
        STATE | {"state": OF_PPO | {"score_moments": {"number": 1.0}}},
    ],
    ids=lambda state: json.dumps(state)[:60],
)
def test_a_state_that_makes_no_sense_is_refused(tmp_path, state):
    assert "state.json can't be read" in refused(write_run(tmp_path, state=state))


def test_the_state_of_a_checkpoint_is_read(tmp_path):
    run = resumed(write_run(tmp_path))
    state = run.config.algorithm.read_state(run.state["state"])
    moments = RunningMoments(3.0, 0.1, 2.5)
    assert state == ppo.State(0.1, moments, moments)
    assert {name: run.state[name] for name in ABOUT} == ABOUT
    assert recorded.run_state(RunState(state)) == {"state": OF_PPO}


def test_inputs_are_those_of_the_checkpoint(tmp_path):
    now = {"prompts in x": "abc", "columns of the prompts in x": "1", "algorithm": "2", "tokenizer files in y": "3"}
    run = resumed(write_run(tmp_path, state=STATE | {"inputs": now}))
    refuse_other_inputs(now, run)
    for name in (*now, "model in y"):
        with pytest.raises(UserError, match=f"the {name} changed since {tmp_path} was started; restore"):
            refuse_other_inputs(now | {name: "another"}, run)


@pytest.mark.parametrize("before", [2, None])
def test_a_checkpoint_that_came_since_is_not_overlooked(tmp_path, before):
    """Another run was still writing when this one began to start: what it has done must not be cut off."""
    found = resumed(write_run(tmp_path, iteration=before))
    refuse_older(found)
    write_run(tmp_path, iteration=3)
    with pytest.raises(UserError, match="its newest checkpoint is now iteration-000003.*resume it again"):
        refuse_older(found)
    refuse_older(resumed(tmp_path))


# ---- the time of the first start -------------------------------------------------------------------------------------


def test_the_time_of_the_first_start(tmp_path):
    folder = write_run(tmp_path)
    assert resumed(folder).started == "" and resumed(folder).products is None
    first, path = "2026-02-03T00:00:00+01:00", folder / "program.json"
    path.write_text(json.dumps({"started": first, "products": {"library": "onednn"}}), encoding="utf-8")
    run = resumed(folder)
    assert run.started == first and run.products == ({"library": "onednn"}, str(path))
