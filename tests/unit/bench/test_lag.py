"""`bench lag`: which runs there are, whose weights generate, and the intervals of paired differences."""

import pytest

from bench.numbers import lag


def test_intervals_of_five_pairs():
    """Student's: of the differences 0.1 to 0.5, 0.3 +- 2.776 x 0.1581 / sqrt(5). Pairs have the same warm-up. A lag in
    nats that some rows lack is left out."""
    rows = []

    def add(seed, late, mean, *, warmup=0, **more) -> None:
        case = {"page": "ppo", "seed": seed, "lag": late, "correction": "TIS"} | {"actor_lr": 1e-4, "warmup": warmup}
        rows.append(case | {"accuracy_mean": mean, "accuracy_last": 1 - mean, "parity_mean_abs": 0.1 * seed} | more)

    for seed in lag.SEEDS:
        add(seed, 0, 0.1 * seed)
        add(seed, 2, 0.2 * seed + 0.1, parity_mean_abs_largest=0.2 * seed)
        add(seed, 2, 7.0, warmup=80)  # its runs without a lag are missing
        if seed < 4:  # not all seeds
            add(seed, 4, 0.0, **({"parity_mean_abs_largest": 1.0} if seed else {}))
    found, of_four = lag.paired(rows)
    assert found["last_difference"] == pytest.approx(-0.3) and found["last_half"] == pytest.approx(found["half"])
    assert (found["nats"], found["largest_nats"]) == pytest.approx((0.2, 0.4))
    assert of_four["largest_nats"] is None and of_four["nats"] == pytest.approx(0.15)
    assert (found["page"], found["lag"], found["correction"]) == ("ppo", 2, "TIS")
    assert found["difference"] == pytest.approx(0.3) and found["half"] == pytest.approx(0.19629, rel=1e-3)
    assert (of_four["lag"], of_four["seeds"], found["seeds"]) == (4, 4, 5)
    assert of_four["half"] == pytest.approx(3.182 * 0.12910 / 2, rel=1e-3)  # of 0, -0.1, -0.2 and -0.3
