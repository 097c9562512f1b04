"""A run compared with its forecast."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rlhf_spmd.plan.cost.calibration import Machine
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.cost.forecast_summary import call_s
from rlhf_spmd.plan.program.instructions import Run
from rlhf_spmd.plan.workload import Answers
from rlhf_spmd.runtime.execute.response_hashes import ROW
from rlhf_spmd.runtime.profile.calibration_probe import AtHand
from rlhf_spmd.runtime.run.forecast_report import WHOLE, compare, compared_run
from tests.unit.plan.cost.test_seconds import example, machine

HERE = Machine("p", "d", 2.0, 1, "t")


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("flattening", 2, {}),
        ("interleaving1", 4, {}),
        ("separation", 4, {"chain": False}),
        ("separation", 4, {"chain": True}),  # iterations overlap
        ("flattening", 2, {"zero": 3}),
    ],
)
def test_a_run_that_goes_as_forecast_is_measured_so(name, size, options):
    """Spans like those of runtime/execute/executor.py, taken from the forecast itself: each row must then agree with
    it."""
    program, calibration = example(name, size, **options), machine(layer_s=1e-4)
    found = forecast(program, calibration)
    made = []
    for rank, (steps, times) in enumerate(zip(program.instructions, found.times, strict=True)):
        spans = []
        for number, slower in ((0, 9.0), (1, 1.0), (2, 1.0)):  # the first iteration, which does not count, takes longer
            shift, slower = (found.makespan_s * number, 1.0) if program.chains else (100.0 * number, slower)
            for step, (begin_s, end_s) in zip(steps, times, strict=True):
                kind = "compute" if isinstance(step, Run) else "wait"
                span = [getattr(step, "call", "other"), kind, shift + begin_s * slower, shift + end_s * slower]
                spans.append([*span, number, {}])
        made.append({"rank": rank, "host": "", "spans": spans})
    workload = program.workload
    lengths = ((workload.max_prompt,), (workload.max_response,))
    compared = compare(program, AtHand(calibration, calibration), made, lengths)
    rows = {row.call: row for row in compared.rows}
    assert rows[WHOLE].forecast_s == pytest.approx(found.makespan_s)
    assert set(rows) == {call for call, s in call_s(found).items() if s > 0} | {WHOLE}
    for row in rows.values():
        assert row.measured_s == pytest.approx(row.forecast_s, rel=1e-6), row
    assert compared.scaled_by == 1


def test_nothing_is_forecast_by_a_calibration_that_was_not_scaled():
    """The seconds of another machine stand nowhere beside the measured ones, and the reason is printed."""
    program, given = example("flattening", 1), replace(machine(), machine=replace(HERE, processor="Other"))
    why = "this machine was too slow, or too busy, for a probe"
    spans = [[step.call, "compute", 0.0, 1.0, 0, {}] for step in program.instructions[0] if isinstance(step, Run)]
    records, lengths = [{"rank": 0, "host": "", "spans": spans}], ((5,), (7,))
    compared = compare(program, AtHand(given, given, why_not=why), records, lengths)
    shown = compare(program, AtHand(given, given), records, lengths)
    assert [(row.call, row.measured_s) for row in compared.rows] == [(row.call, row.measured_s) for row in shown.rows]
    written = compared.to_json()
    assert {row["forecast_s"] for row in written["rows"]} == {None} and written["why_not"] == why
    assert written["scaled_by"] is None
    assert compared.notes == [f"no forecast beside the measured time: {why}"]


def test_episodes_stand_beside_their_forecast():
    expected, found = Answers(2, 48, 0.1, 0.3), Answers(3.5, 13, 0.06, 0.12)
    program = example("flattening", 1)
    program = replace(program, workload=replace(program.workload, answers=expected))
    hands = AtHand(machine(), machine())
    spans = [[step.call, "compute", 0.0, 1.0, 0, {}] for step in program.instructions[0] if isinstance(step, Run)]
    records = [{"rank": 0, "host": "", "spans": spans}]
    compared = compare(program, hands, records, ((5, 5), (7, 9)), found)
    assert compared.to_json()["episodes"]["measured"]["turns"] == 3.5
    (note,) = compared.notes
    measured, _, forecast_text = note.partition("; forecast: ")
    assert "3.5 turns" in measured and "2 turns with 48 tokens" in forecast_text and "0.3 s" in forecast_text
    assert not compare(program, hands, records, ((5,), (7,))).notes


def test_a_run_whose_last_iteration_ends_no_response_is_not_compared(monkeypatch):
    """With partial_steps all of them may go on."""
    monkeypatch.setattr("rlhf_spmd.runtime.run.forecast_report.at_hand", lambda *_: AtHand(machine(), machine()))
    prompts = SimpleNamespace(prompts=SimpleNamespace())
    program = example("flattening", 1)
    job = SimpleNamespace(
        world=SimpleNamespace(rank=0), config=None, program=program, workload=program.workload, prompts=prompts
    )
    assert compared_run(job, None, machine(), [{"iteration_s": 1.0}], [], [{"rows": np.zeros(0, ROW)}]) is None
