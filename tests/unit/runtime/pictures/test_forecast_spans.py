"""A forecast as the spans of a trace."""

import pytest

from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.runtime.pictures.forecast_spans import spans_of_forecast
from rlhf_spmd.runtime.world.trace import busy_fraction, lanes
from tests.unit.plan.cost.test_seconds import example, machine


def test_records_are_the_forecast():
    calibration = machine(decode_layer_s=1e-6)
    found = forecast(example("separation", 4), calibration)
    all_lanes = lanes(spans_of_forecast(found))
    assert max(span.end_s for lane in all_lanes for span in lane.spans) == pytest.approx(found.makespan_s)
    busy = [busy_fraction(lane.spans, 0.0, found.makespan_s) for lane in all_lanes]
    worked = [0.0] * 4
    for lane in all_lanes:
        worked[lane.rank] = sum(span.end_s - span.start_s for span in lane.spans if span.category == "compute")
    assert busy == pytest.approx([one / found.makespan_s for one in worked])
