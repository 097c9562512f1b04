"""Plans against strategies on CPU ranks: what is planned, and what a row says."""

from dataclasses import replace

import pytest

from bench.forecast.measure_cpu import searched
from bench.forecast.measure_plans import CHOOSING, ROUNDS, TOP, Case, planned, rows_of, write_critic
from bench.tables import text_table
from rlhf_spmd.command_line.fitting_strategies import COMPARED
from rlhf_spmd.command_line.plans import Alternative, Misfit, fitted, most_promising
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster

LENGTHS = {"prompts": [6, 8, 9, 12] * 32, "responses": [14, 18, 20, 24] * 32}
CPU = load_calibration("cpu-2core")


def test_three_plans_and_all_strategies_are_run():
    case = planned(["num_samples=0"], LENGTHS, 4, CPU)
    names = [name for name, _, _ in case.told]
    assert case.num_plans == TOP == len({*names[:TOP]} - {*names[TOP:]})
    assert sorted(name for name in names if not name.startswith("plan ")) == sorted(COMPARED)
    forecasts = [seconds for _, _, seconds in case.told]
    assert forecasts[0] == min(forecasts) and forecasts[:TOP] == sorted(forecasts[:TOP])


def test_the_critic_is_five_times_the_actor(tmp_path):
    write_critic(tmp_path / "critic")
    models = make_workload(load("tiny", [f"models.critic={tmp_path / 'critic'}"])).models
    assert 5 < models["critic"].num_params / models["actor"].num_params < 6
    assert planned([f"models.critic={tmp_path / 'critic'}"], LENGTHS, 4, CPU).num_plans == TOP


def test_the_plan_is_chosen_in_the_first_rounds():
    case = Case([("plan 1 (a)", "", 1.0), ("plan 2 (b)", "", 1.1), ("flattening", "", 2.0)], 2)
    seconds = [
        [9.0, *[one] * (CHOOSING - 1), *[later] * ROUNDS] for one, later in ((1.2, 1.0), (1.1, 1.2), (1.0, 1.16))
    ]
    first, second, shipped = rows_of(case, seconds)
    assert (first["chosen"], second["chosen"], shipped["chosen"]) == (False, True, False)
    assert second["behind"] == pytest.approx(0.2) and second["ok"] is False
    assert first["ok"] is None and first["error"] == pytest.approx(0.0)
    seconds[0][CHOOSING:] = seconds[2][CHOOSING:] = [1.16] * ROUNDS
    assert rows_of(case, seconds)[1]["ok"]
    rows = [{"workload": "short", "ranks": 4} | row for row in rows_of(case, seconds)]
    assert text_table("measure_plans", rows).splitlines()[2].split()[:6] == ["short", "4", "plan", "2", "(b)", "yes"]


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
