"""Published measurements against forecasts: the systems as placements, what is summed up."""

import hashlib

import pytest

from bench.forecast.scan import phase_s
from bench.forecast.validate import COLUMNS, DATA, REST, cluster_of, judged, read_rows, workload_of
from bench.forecast.validate_systems import EAGER_LAYER_S, HOST_ADAM, SYSTEMS, USABLE, fastest
from bench.rows import RESULTS
from bench.rows import read_rows as read_jsonl
from rlhf_spmd.machines.calibration_file import read_calibration

CALIBRATION = read_calibration(str(DATA / "real_v1.json"))


def row_of(system: str, actor: str, gen_len: str = "128") -> dict[str, str]:
    found = [row for row in read_rows() if (row["system"], row["actor_b"], row["gen_len"]) == (system, actor, gen_len)]
    assert len(found) == 1
    return found[0]


def test_no_constant_was_chosen_with_the_unseen_rows_in_sight():
    """Who changes a constant or an assumption writes both forecasts of these rows into RESULTS, and changes this."""
    constants = (DATA / "real_v1.json").read_bytes() + repr((USABLE, HOST_ADAM, EAGER_LAYER_S)).encode()
    assert hashlib.sha256(constants).hexdigest() == "4f79acc3bbd583c6591afdb43930b9bd6b214e792f80228b8e5792fbb9941216"
    unseen = read_rows(REST)
    assert len(unseen) == 91 and {row["case"] for row in unseen} == {"scale_critic", "scale_both"}
    row = next(row for row in unseen if row["system"] == "ReaL-Heuristic" and row["critic_b"] == "13")
    forecast = judged(row, CALIBRATION, [])
    assert forecast["seconds_are"] == "unseen" and forecast["error"] == pytest.approx(0.0, abs=0.3)


@pytest.mark.parametrize(("actor", "gen_len"), [("7", "128"), ("34", "384")])
def test_the_published_rows_come_out(actor, gen_len):
    """Of ReaL-Heuristic, within the promised 12%."""
    row = row_of("ReaL-Heuristic", actor, gen_len)
    assert judged(row, CALIBRATION, [])["forecast_s"] == pytest.approx(float(row["sec_per_iter"]), rel=0.12)


def test_stages_of_openrlhf_are_those_published():
    """ReaLHF's issue 10: of 94.9 s, training takes 51.0 s and inference 19.4 s."""
    row = row_of("OpenRLHF", "34")
    found, plan = fastest("OpenRLHF", workload_of(row), cluster_of(row), CALIBRATION)
    phases = phase_s(found)
    assert plan == "ZeRO 3, vLLM tp 2"
    assert phases["training"] == pytest.approx(51.0, rel=0.1)
    assert phases["inference"] == pytest.approx(19.4, rel=0.1)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_judged_row_is_the_committed_one(system):
    row, kept = row_of(system, "7"), read_jsonl(RESULTS / "validate.jsonl")
    (before,) = (one for one in kept if all(one[name] == row[name] for name in COLUMNS))
    found = judged(row, CALIBRATION, [])
    assert (found["plan"], found["seconds_are"]) == (before["plan"], before["seconds_are"])
    assert found["forecast_s"] == pytest.approx(before["forecast_s"], rel=1e-4)
