"""The message about one rank's failure: where it was, in words."""

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.guard import failures


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("iteration 3: Run actor_train", "no (reported by rank 1, in iteration 3: Run actor_train)"),
        ("after the samples", "no (reported by rank 1, after the samples)"),
        ("", "no (reported by rank 1)"),
    ],
)
def test_the_position_reads_as_a_sentence(where, says):
    assert failures.report(UserError("no"), "rank 1", where, "") == failures.PREFIX + says
