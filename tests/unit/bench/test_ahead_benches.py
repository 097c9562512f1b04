"""Benches about drawing one iteration ahead: what is judged, and how rows of the suite become a table."""

from bench.forecast.suites import SUITES


def test_the_suite_has_all_strategies_in_every_place():
    cases = SUITES["ahead"].cases
    places = {(case.preset, case.layout, case.calibration, case.overrides) for case in cases}
    assert len(cases) == 3 * len(places) == 63
    assert [case.options.get("ahead") for case in cases[:3]] == [None, None, 1]
