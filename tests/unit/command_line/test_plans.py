"""Plans on the command line: what fits, and --strategy auto."""

import pytest

from rlhf_spmd.command_line.plans import Alternative, Misfit, ahead_text, alternatives, auto, fastest, fitted, kind_of
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.errors import UserError
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.search.planner import SEPARATION_AHEAD
from tests.unit.plan.cost.test_seconds import machine


def test_a_strategy_that_does_not_fit_says_how_many_bytes_are_missing():
    cluster, workload = Cluster.parse("2x8", "a100-80g"), make_workload(load("llama-70b"))
    found = fitted("flattening", workload, cluster, load_calibration("a100-80g"))
    assert isinstance(found, Misfit) and found.note.startswith("does not fit: a device lacks ")


def test_a_strategy_is_tried_with_more_sharding_until_it_fits():
    cluster, workload = Cluster.parse("2x8", "a100-80g"), make_workload(load("llama-13b"))
    found = fitted("flattening", workload, cluster, load_calibration("a100-80g"))
    assert isinstance(found, Alternative) and "zero=3" in found.note
    assert fitted("flattening", workload, Cluster.parse("1x2"), machine()).note == ""  # a CPU's memory has no limit


def test_no_row_that_passes_check_is_one_message():
    with pytest.raises(UserError, match="there is no plan for 1x1.*check"):
        fastest([], Cluster.parse("1x1"))


def test_auto_is_the_same_every_time_and_is_what_its_source_says(tmp_path):
    config, cluster = load("tiny", ["rollout_batch=16", "mini_batch=8"]), Cluster.parse("1x4")
    workload = make_workload(config)
    found, again = (auto(config, workload, cluster, machine(layer_s=1e-4)) for _ in range(2))
    assert found.source == again.source
    (tmp_path / "kept.py").write_text(found.source, encoding="utf-8")
    kept = load_strategy(str(tmp_path / "kept.py")).compile(workload, cluster, {})
    assert kept.fingerprint == found.compile(workload, cluster, {}).fingerprint


def test_separation_one_iteration_ahead_stands_beside_the_others_and_its_worth_is_said():
    """Four 1.5B models and two epochs: the best plan pays, the shipped strategy with its usual options would not."""
    cluster, words = Cluster.parse("1x8", "a100-80g"), ["shape=actor=qwen2.5-1.5b,critic=qwen2.5-1.5b"]
    workload = make_workload(load("llama-7b", ["ppo.epochs=2", *words]))
    options = {"aheads": (0, 1), "method": "two_phase", "keep": 2}
    rows, found = alternatives(workload, cluster, load_calibration("a100-80g"), top=1, **options)
    seconds = [plan.forecast.makespan_s for plan in found.plans]
    assert seconds == sorted(seconds) and {plan.placement.ahead for plan in found.plans} == {0, 1}
    plans = [row for row in rows if row.name.startswith("plan ")]
    assert {row.program.placement.ahead for row in plans} == {0, 1}  # the best of both, whatever `top` is
    (ahead,) = [row for row in plans if row.program.placement.ahead]
    assert kind_of(ahead) == SEPARATION_AHEAD
    said = ahead_text(rows, workload)
    assert said.startswith(f"One iteration ahead pays: {ahead.name} takes {ahead.forecast.makespan_s:.4g} s, 1.")
    assert "times as fast as flattening" in said
    said = ahead_text([row for row in rows if row is not ahead], workload)
    assert said.startswith(f"One iteration ahead would not pay: {SEPARATION_AHEAD} takes ")


def test_what_cannot_be_drawn_ahead_is_planned_without_it():
    config = load("tiny", ["ppo.old_logprobs=recompute", "ppo.importance_weights=token"])
    workload, cluster = make_workload(config), Cluster.parse("1x2")
    rows, found = alternatives(workload, cluster, machine(), aheads=(0, 1), method="two_phase", keep=1)
    assert {plan.placement.ahead for plan in found.plans} == {0}
    said = ahead_text(rows, workload)
    assert said.startswith("One iteration ahead is out of the question: ahead: actor_train corrects")
