"""Plans on the command line: what fits, and --strategy auto."""

from rlhf_spmd.command_line.fitting_strategies import Fit, first_fit
from rlhf_spmd.command_line.plans import alternatives, auto
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.search.planner import SEPARATION_AHEAD
from tests.programs import make_workload as small_workload
from tests.unit.plan.cost.test_seconds import machine


def test_a_strategy_is_tried_with_more_sharding_until_it_fits():
    def fit(preset: str) -> Fit:
        return first_fit("flattening", make_workload(load(preset)), Cluster.parse("2x8", "a100-80g"))

    assert fit("llama-70b").program is None and fit("llama-70b").note.startswith("does not fit: a device lacks ")
    assert fit("llama-13b").program and "zero=3" in fit("llama-13b").note
    small = first_fit("flattening", small_workload(), Cluster.parse("1x2"))
    assert small.program and small.note == ""  # a CPU's memory has no limit


def test_auto_is_the_same_every_time_and_is_what_its_source_says(tmp_path):
    config, cluster = load("tiny", ["rollout_batch=16", "mini_batch=8"]), Cluster.parse("1x4")
    workload = make_workload(config)
    found, again = (auto(config, workload, cluster, machine(layer_s=1e-4)) for _ in range(2))
    assert found.source == again.source
    (tmp_path / "kept.py").write_text(found.source, encoding="utf-8")
    kept = load_strategy(str(tmp_path / "kept.py")).compile(workload, cluster, {})
    assert kept.fingerprint == found.compile(workload, cluster, {}).fingerprint


def test_separation_one_iteration_ahead_stands_beside_the_others():
    """Four 1.5B models and two epochs: the best plan pays, the shipped strategy with its usual options would not."""
    cluster, words = Cluster.parse("1x2", "a100-80g"), ["shape=actor=qwen2.5-1.5b,critic=qwen2.5-1.5b"]
    workload = make_workload(load("llama-7b", ["ppo.epochs=2", *words]))
    options = {"aheads": (0, 1), "method": "two_phase", "keep": 2}
    rows, _, found = alternatives(workload, cluster, load_calibration("a100-80g"), top=1, **options)
    seconds = [plan.forecast.makespan_s for plan in found.plans]
    assert seconds == sorted(seconds) and {plan.placement.ahead for plan in found.plans} == {0, 1}
    plans = [row for row in rows if row.name.startswith("plan ")]
    assert {row.program.placement.ahead for row in plans} == {0, 1}  # the best of both, whatever `top` is
    (ahead,) = [row for row in plans if row.program.placement.ahead]
    assert SEPARATION_AHEAD in {row.name for row in rows}
