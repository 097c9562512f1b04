"""The benches of overlap: their verdicts, and that the sleeps leave something to gain."""

import pytest

from bench.speed import overlap, overlap_real
from rlhf_spmd.plan.cost.simulate import Times, simulate


def rows_with(name: str, **changes) -> list[dict]:
    """Returns rows of both numbers of ranks that are as good as forecast, but for changes of one."""
    forecast_s = dict.fromkeys(overlap.VARIANTS, 3.0) | {"flattening": 5.0, "two epochs": 4.5, "four ranks": 4.2}
    return [
        {"strategy": row, "ranks": overlap.VARIANTS[row].num_ranks, "forecast_s": s, "measured_s": s}
        | (changes if row == name else {})
        for row, s in forecast_s.items()
    ]


@pytest.mark.parametrize(
    ("name", "measured_s", "ok"),
    [
        ("separation", 3.4, True),
        ("separation", 3.5, False),  # 15%
        ("four ranks", 4.4, True),
        ("four ranks", 4.42, False),  # 5%
        ("four ranks in a chain", 2.84, False),
        ("four ranks in a chain", 3.14, True),
    ],
)
def test_a_row_is_near_its_critical_path(name, measured_s, ok):
    rows = rows_with(name, measured_s=measured_s)
    overlap.judge(rows)
    assert [row["strategy"] for row in rows if not row["ok"]] == ([] if ok else [name])


def test_overlap_gains_over_the_row_without():
    rows = rows_with("four ranks in a chain", forecast_s=3.3, measured_s=3.3)
    overlap.judge(rows)
    chain = rows[-1]
    assert chain["gain_measured"] == chain["gain_forecast"] == pytest.approx(4.2 / 3.3) and not chain["ok"]
    assert all(row["ok"] for row in rows[:-1]) and "gain_measured" not in rows[0]


def test_a_strategy_is_faster_than_flattening():
    rows = rows_with("interleaving1", forecast_s=5.1, measured_s=5.1)
    overlap.judge(rows)
    assert [row["strategy"] for row in rows if not row["ok"]] == ["interleaving1"]


def test_sleeps_leave_something_to_gain(tmp_path):
    overlap.write_models(tmp_path)

    def period_s(name):
        _, program = overlap.compiled(name, tmp_path)
        of_call = overlap.VARIANTS[name].slow_s
        return simulate(program, Times(lambda rank, run: overlap.slow_s(program, run, of_call))).makespan_s

    for name, (other, least) in overlap.GAINS.items():
        assert period_s(other) / period_s(name) > 1.05 * least


@pytest.mark.parametrize(
    ("seconds", "simulated", "ok"),
    [
        ((2.0, 1.5, 1.1), (2.0, 1.5, 1.0), True),
        ((2.0, 1.5, 1.25), (2.0, 1.5, 1.0), False),  # less than 1.25 times as fast as the fastest
        ((1.5, 2.0, 1.19), (2.0, 1.5, 1.0), False),  # the fastest is another one: 0.9 of 2.0 times
        ((2.0, 1.5, 1.1), (2.0, 1.5, 1.2), False),  # simulated 1.25
    ],
)
def test_the_real_chain_gains_over_the_fastest_program_without(seconds, simulated, ok):
    pairs = zip(seconds, simulated, strict=True)
    rows = [{"measured_s": measured_s, "simulated_s": simulated_s} for measured_s, simulated_s in pairs]
    assert overlap_real.judge(rows, overlap_real.PARTS["chain-real"]) == ok
    assert rows[0]["gain"] == seconds[0] / seconds[2] and "gain" not in rows[2]
