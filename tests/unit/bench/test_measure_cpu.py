"""Plans on CPU ranks: which are measured, and that what is run is what is forecast."""

from dataclasses import replace

from bench.forecast.measure_cpu import searched
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.workload import ResponseLengths

LENGTHS = ResponseLengths.of([14, 18, 20, 24] * 32, [6, 8, 9, 12] * 32)
CPU = load_calibration("cpu-2core")


def test_a_searched_plan_is_a_strategy_file(tmp_path):
    """What `measure-cpu` runs is the program that it forecasts."""
    file, words, cluster = tmp_path / "plan.py", ["num_samples=0"], Cluster.parse("1x4")
    config = load("tiny", words, algorithm="grpo")
    workload = replace(make_workload(config), forecast_lengths=LENGTHS)
    program, source = searched(config, workload, cluster, CPU, words)
    file.write_text(source, encoding="utf-8")
    assert load_strategy(str(file)).compile(make_workload(config), cluster, {}).instructions == program.instructions
