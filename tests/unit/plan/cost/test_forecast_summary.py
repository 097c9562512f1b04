"""Summary numbers of a forecast, against sums by hand."""

import pytest

from rlhf_spmd.plan.cost.forecast_summary import bubble, call_s
from rlhf_spmd.plan.cost.simulate import Times, simulate
from rlhf_spmd.strategies import interleaving2
from tests.unit.plan.cost.test_simulate import program_of, seconds


def test_a_rank_that_waits_for_its_group_is_not_busy():
    """Reward's half waits 2 s for reference's before the values, and rank 0's generation lasts 3 s longer."""
    program = program_of(interleaving2.place, 2)
    times = seconds(program)
    found = simulate(program, Times(lambda rank, step: times(rank, step) + 3 * (rank == 0 and "generate" in step.call)))
    assert call_s(found)["actor_generate"] == pytest.approx(11)
    # rank 1 waits 3 s for the responses, and one of both 2 s for the other's inference
    assert bubble(found) == pytest.approx((3 + 2) / (2 * found.makespan_s))
