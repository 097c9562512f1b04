"""Where an iteration's time goes: a hand-made trace of two ranks with known answers."""

import pytest

from bench.speed.shares import mean_shares, shares
from rlhf_spmd.runtime.world.trace import lanes
from tests.programs import make_workload, place_calls


def test_waiting_ends_when_the_peer_has_posted():
    """Rank 0 generates, rank 1 scores: in iteration 1 the responses are posted at 13.0 and arrive at 13.2."""
    program = place_calls(make_workload(), "1x2", actor_generate=(0,), reward_infer=(1,))
    assert [transfer.peers(0) for transfer in program.transfers[:1]] == [{1}]
    number = {"transfer": 0}
    first = ["metrics", "control", 9.0, 10.0, 0, {}]
    zero = [
        first,
        ["actor_generate", "compute", 10.1, 13.0, 1, {}],
        ["post", "transfer", 13.0, 13.1, 1, number],
        ["wait", "wait", 13.1, 13.3, 1, number],  # the peer has posted long ago
        ["metrics", "control", 13.3, 15.0, 1, {}],
    ]
    one = [
        first,
        ["post", "transfer", 10.1, 10.2, 1, number],
        ["wait", "wait", 10.2, 13.2, 1, number],
        ["reward_infer", "compute", 13.2, 14.5, 1, {}],
        ["metrics", "control", 14.5, 15.0, 1, {}],
    ]
    records = [{"rank": rank, "host": "", "spans": spans} for rank, spans in enumerate((zero, one))]
    found = shares(lanes(records), program)
    assert found == [
        pytest.approx({"total_s": 5.0, "compute_s": 2.9, "waiting_s": 1.2, "control_s": 0.9}),
        pytest.approx({"total_s": 5.0, "compute_s": 1.3, "waiting_s": 2.8, "control_s": 0.9}),
    ]
    assert mean_shares(lanes(records), program)["control"] == pytest.approx(0.18)
