"""A forecast as the spans of a trace."""

import pytest

from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.cost.forecast_summary import bubble
from rlhf_spmd.runtime.pictures.forecast_spans import spans_of_forecast
from rlhf_spmd.runtime.world.trace import busy_fraction, lanes
from tests.unit.plan.cost.test_seconds import example, machine


def test_records_are_the_forecast():
    calibration = machine(decode_layer_s=1e-6)
    found = forecast(example("separation", 4, chain=False), calibration)
    all_lanes = lanes(spans_of_forecast(found))
    assert max(span.end_s for lane in all_lanes for span in lane.spans) == pytest.approx(found.makespan_s)
    busy = [busy_fraction(lane.spans, 0.0, found.makespan_s) for lane in all_lanes]
    worked = [0.0] * 4
    for lane in all_lanes:
        worked[lane.rank] = sum(span.end_s - span.start_s for span in lane.spans if span.category == "compute")
    assert busy == pytest.approx([one / found.makespan_s for one in worked])


def test_a_chain_is_drawn_for_the_time_of_two_iterations():
    """Every rank is as busy as the forecast says, with two iterations and the end of the one before them."""
    found = forecast(example("separation", 4, chain=True), machine(decode_layer_s=1e-6))
    all_lanes = lanes(spans_of_forecast(found))
    every = [span for lane in all_lanes for span in lane.spans]
    assert {span.iteration for span in every} == {None, 0, 1}
    assert max(span.end_s for span in every) == pytest.approx(2 * found.makespan_s)
    busy = [busy_fraction(lane.spans, 0.0, 2 * found.makespan_s) for lane in all_lanes]
    assert sum(busy) / 4 == pytest.approx(1 - bubble(found))
    for lane in all_lanes:
        assert sum(span.end_s - span.start_s for span in lane.spans) == pytest.approx(2 * found.makespan_s)
        alike = [[span.name for span in lane.spans if span.iteration == number] for number in (0, 1)]
        assert set(alike[1]) <= set(alike[0])
    first, second = ([span for span in every if span.iteration == number] for number in (0, 1))
    assert min(span.start_s for span in second) < max(span.end_s for span in first)
