"""A metric that explodes is named once; one that only grows is not."""

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.algorithm import load_algorithm
from rlhf_spmd.runtime.run.metrics import Alarm, check_finite, metrics_of, timeouts_note

PPO = load_algorithm("ppo")
METRICS = metrics_of(PPO, PPO.workflow(PPO.options()))


def test_growth_is_no_alarm():
    alarm = Alarm(METRICS)
    for number in range(30):
        metrics = {"kl": 0.2 * number, "ratio": 1.0 + 0.01 * number, "actor_grad_norm": 3.0, "tokens_sha256": "x"}
        assert alarm.notes(metrics) == []


def test_an_explosion_is_told_once():
    alarm = Alarm(METRICS)
    for number in range(4):
        assert alarm.notes({"kl": 0.3 + 0.1 * number, "value_loss": 0.5}) == []
    (text,) = alarm.notes({"kl": 9.0, "value_loss": 0.5})
    assert text.startswith("warning: kl is 9, and was at most 0.6 before: ") and "ppo.kl_coef" in text
    assert alarm.notes({"kl": 1000.0, "value_loss": 0.6}) == []  # told already
    (text,) = alarm.notes({"kl": 1000.0, "value_loss": 60.0, "ratio": 1.5})
    assert "value_loss is 60" in text
    (text,) = alarm.notes({"kl": 1.0, "ratio": 3.0})
    assert "ratio is 3, not in 0.5 to 2" in text


def test_the_first_iterations_only_teach():
    alarm = Alarm(METRICS)
    assert alarm.notes({"actor_grad_norm": 0.1}) == []
    assert alarm.notes({"actor_grad_norm": 50.0}) == []


def test_episodes_that_were_dropped_make_a_run_inexact_and_end_one_without_others():
    rows = [{"dropped_episodes": 0.0, "greedy_dropped_episodes": 0.0}]
    assert timeouts_note(rows) == ""
    assert timeouts_note([*rows, {"dropped_episodes": 0.1}]).endswith("depends on the speed of the machine")
    check_finite({"dropped_episodes": 0.9}, "iteration 3")
    with pytest.raises(UserError, match="iteration 3: every episode was dropped: repair the environment, which broke"):
        check_finite({"dropped_episodes": 1.0}, "iteration 3")


def test_time_limits_that_were_reached_make_a_run_inexact():
    rows = [{"tool_timeouts": 0.0, "end_rollout_timeout": 0.0, "reward_timeouts": 0.0}, {"kl": 0.1}]
    assert timeouts_note(rows) == ""
    for name in ("tool_timeouts", "end_rollout_timeout"):
        text = timeouts_note([*rows, {name: 0.01}])
        assert f"({name}), so this run cannot be repeated exactly" in text
    assert "(reward_timeouts), so this" in timeouts_note([*rows, {"reward_timeouts": 2.0}])
