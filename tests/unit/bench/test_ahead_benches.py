"""Benches about drawing one iteration ahead: what is judged, and how rows of the suite become a table."""

import pytest

from bench.ahead_tables import joined_ahead
from bench.columns import JOINED
from bench.forecast.claims import ahead_gains
from bench.forecast.suites import SUITES
from bench.speed.ahead_real import judge, row_of
from bench.tables import markdown
from rlhf_spmd.plan.program.instructions import Run
from tests.unit.plan.program.test_ahead import of_separation


def row(strategy: str, seconds: float | None, **more) -> dict:
    overrides = "forecast_lengths=512,1.0 ppo.epochs=2 generation.max_new_tokens=2048"
    place = {"preset": "llama-7b", "layout": "1x8", "calibration": "a100-80g", "overrides": overrides}
    return place | {"strategy": strategy, "iteration_s": seconds, "options": {}} | more


def test_a_case_of_the_suite_is_one_line_with_its_gains():
    phases = {"generation_s": 10.0, "inference_s": 2.0, "training_s": 14.0}
    rows = [
        row("flattening", 21.0),
        row("planner", 18.0, options={"plan": "mixed"}),
        row("one iteration ahead", 15.0, **phases),
    ]
    (found,) = joined_ahead(rows)
    assert (found["gain_flattening"], found["gain_planner"], found["drawing_s"]) == (1.4, 1.2, 12.0)
    assert "lognormal, mean 512, sigma 1.0; epochs 2" in markdown(JOINED["ahead"][2], [found])[2]
    assert ahead_gains(rows) == {"ahead_faster_than_planner": [], "ahead_faster_than_flattening": []}
    (absent,) = joined_ahead([*rows[:2], row("one iteration ahead", None)])
    assert absent["gain_planner"] is absent["drawing_s"] is None


def test_the_suite_has_all_strategies_in_every_place():
    cases = SUITES["ahead"].cases
    places = {(case.preset, case.layout, case.calibration, case.overrides) for case in cases}
    assert len(cases) == 3 * len(places) == 63
    assert [case.options.get("ahead") for case in cases[:3]] == [None, None, 1]


def test_real_iterations_are_judged_over_the_fastest_without():
    rows = [{"measured_s": 3.0, "simulated_s": 3.0}, {"measured_s": 2.8, "simulated_s": 2.9}]
    ahead = {"measured_s": 2.0, "simulated_s": 1.9}
    assert judge([*rows, ahead])
    assert rows[0]["gain"] == 1.5 and rows[1]["gain_simulated"] == pytest.approx(2.9 / 1.9)
    assert not judge([rows[0], rows[1] | {"measured_s": 2.5}, ahead])  # 1.25 times
    assert not judge([rows[0] | {"simulated_s": 3.4}, ahead])  # 1.5 times, where simulate gives 1.79


def test_halves_and_critical_path_are_those_of_the_median_runs():
    """Every Run takes a second, but in one iteration, which no median shows."""
    program = of_separation(2)
    runs = [sum(isinstance(step, Run) for step in some) for some in program.instructions]
    rounds = [[(5.0 + late, [1.0 + 9 * late] * num) for num in runs] for late in (0, 0, 1)]
    found = row_of(program, rounds)
    assert found["measured_s"] == 5.0 and found["drawing_s"] + found["training_s"] == sum(runs)
    assert max(runs) <= found["simulated_s"] <= sum(runs)
