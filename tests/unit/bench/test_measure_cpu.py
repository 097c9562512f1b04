"""Plans on CPU ranks: which are measured, and that what is run is what is forecast."""

from dataclasses import replace

from bench.forecast.measure_cpu import lengths_of, searched
from rlhf_spmd import embedded
from rlhf_spmd.command_line.plans import Alternative, Misfit, fitted, most_promising
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.workload import ResponseLengths

LENGTHS = ResponseLengths.of([14, 18, 20, 24] * 32, [6, 8, 9, 12] * 32)
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
    file, words, cluster = tmp_path / "plan.py", ["num_samples=0"], Cluster.parse("1x4")
    config = load("tiny", words, algorithm="grpo")
    workload = replace(make_workload(config), forecast_lengths=LENGTHS)
    program, source = searched(config, workload, cluster, CPU, words)
    file.write_text(source, encoding="utf-8")
    assert load_strategy(str(file)).compile(make_workload(config), cluster, {}).instructions == program.instructions


def test_lengths_are_those_of_the_iterations_that_are_measured():
    """Of three iterations the last two; a run of the program draws the same responses."""
    words = ["iterations=3", "num_samples=0", "rollout_batch=8", "mini_batch=8", "generation.max_new_tokens=12"]
    lengths = lengths_of(load("tiny", words))
    assert len(lengths.rows) == len(lengths.prompts) == 2 * 8
    assert 1 <= min(lengths.rows) < max(lengths.rows) == 12


def test_lengths_of_given_responses_are_those_of_the_file(tmp_path):
    rows, file = (
        embedded.path_of("answers.jsonl").read_text(encoding="utf-8").splitlines(keepends=True),
        tmp_path / "rows",
    )
    file.with_suffix(".jsonl").write_text("".join(rows[:64]), encoding="utf-8")
    lengths = lengths_of(load("tiny", [f"data.prompts={file}.jsonl", "num_samples=0"], algorithm="sft"))
    assert len(lengths.rows) == len(lengths.prompts) == 64
