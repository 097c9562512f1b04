"""Plans on CPU ranks: which are measured, and that what is run is what is forecast."""

from dataclasses import replace

from bench.forecast.measure_cpu import searched
from rlhf_spmd.command_line.plans import Alternative, Misfit, fitted, most_promising
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster

LENGTHS = {"prompts": [6, 8, 9, 12] * 32, "responses": [14, 18, 20, 24] * 32}
CPU = load_calibration("cpu-2core")


def test_each_kind_of_placement_that_may_be_the_fastest_is_measured():
    workload, cluster = make_workload(load("tiny", [])), Cluster.parse("1x4")
    made = {name: fitted(name, workload, cluster, CPU) for name in ("flattening", "separation", "interleaving1")}

    def row(name: str, like: str, seconds: float) -> Alternative:
        return replace(made[like], name=name, forecast=replace(made[like].forecast, times=(((0.0, seconds),),)))

    rows = [row(f"plan {number}", "flattening", 1 + number / 100) for number in (1, 2, 3)]
    rows += [row("plan 4", "separation", 1.05), row("plan 5", "interleaving1", 1.06)]
    rows += [row("separation", "separation", 1.1), row("interleaving1", "interleaving1", 1.3)]
    rows += [Misfit("too large", "does not fit")]
    found = [[one.name for one in most_promising(rows, number)] for number in (1, 2, 3, 4, 5, 9)]
    assert found[:3] == [["plan 1"], ["plan 1", "separation"], ["plan 1", "plan 4", "separation"]]
    assert found[3] == ["plan 1", "plan 4", "plan 5", "separation"]
    assert found[4] == ["plan 1", "plan 2", "plan 4", "plan 5", "separation"]
    assert found[5] == ["plan 1", "plan 2", "plan 3", "plan 4", "plan 5", "separation", "interleaving1"]


def test_a_searched_plan_is_a_strategy_file(tmp_path):
    """What `measure-cpu` runs is the program that it forecasts."""
    file, words = tmp_path / "plan.py", ["num_samples=0"]
    program = searched("grpo", words, LENGTHS, 4, CPU, file)
    again = load_strategy(str(file)).compile(
        make_workload(load("tiny", words, algorithm="grpo")), Cluster.parse("1x4"), {}
    )
    assert again.instructions == program.instructions
