"""The bench of imitated machines: medians of runs, what counts as held, and processes that move to a machine."""

import os
import subprocess
import sys

import pytest

from bench.forecast.machines import AVX2, ENOUGH, MACHINES, Imitated, can_limit, entering, row_of, show
from bench.tables import text_table


def made(measured_s: float, forecast_s: float, as_given_s: float) -> dict:
    """Returns what a run writes beside its forecast."""
    rows = [{"call": "iteration", "forecast_s": forecast_s, "measured_s": measured_s}]
    scale = {"inference": 1.0, "training": 2.0, "generation": 3.0, "num_workers": 1.5}
    return {"rows": rows, "as_given_s": as_given_s, "scale": scale, "probe_s": measured_s, "why_not": ""}


@pytest.mark.parametrize(("forecasts_s", "ok"), [((2.4, 2.5, 9.0), True), ((1.0, 2.6, 2.6), False)])
def test_a_row_has_medians(forecasts_s, ok, capsys):
    runs = [made(2.0, forecast_s, 0.5) for forecast_s in forecasts_s]
    row = row_of(MACHINES[1], runs)
    assert row["ratio"] == pytest.approx(sorted(forecasts_s)[1] / 2) and row["as_given_ratio"] == 0.25
    assert row["ok"] is ok and row["machine"] == "AVX2" and row["probe_s"] == 2.0
    assert "0.25" in text_table("machines", [row])
    show(MACHINES[1], runs[0] | {"scale": None, "why_not": "the run was too short"})
    assert "not scaled 0.50 s; the run was too short" in capsys.readouterr().out


def test_there_are_more_machines_than_must_hold():
    names = [machine.name for machine in MACHINES]
    assert len(set(names)) == len(names) > ENOUGH + 1 and MACHINES[0] == Imitated("as it is")


def in_a_process(machine: Imitated, code: str) -> str:
    """Returns what a process prints that has moved to a machine."""
    with entering(machine) as enter:
        return subprocess.check_output([sys.executable, "-c", code], preexec_fn=enter, encoding="utf-8").strip()


def test_a_process_is_kept_on_cores():
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    mine = sorted(os.sched_getaffinity(0))
    assert in_a_process(Imitated("one", cores=1), code) == str(mine[:1])
    assert in_a_process(Imitated("all", AVX2), code) == str(mine)


@pytest.mark.skipif(not can_limit(), reason="control groups cannot be made here")
def test_a_process_sees_its_quota():
    code = "from rlhf_spmd.runtime.profile.machine import cpu_quota; print(cpu_quota())"
    assert in_a_process(Imitated("quota", quota=1.2), code) == "1.2"
