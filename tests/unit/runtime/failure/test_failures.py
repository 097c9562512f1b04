"""The message about one rank's failure: where it was, in words."""

import errno
import os

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.failure import failures


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


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), "this process ran out of memory (MemoryError: ); lower micro_batch"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "this process has too many open files"),
        (OSError(errno.EIO, "broken", "f"), "broken when reading or writing f: check the disk and the rights"),
        (OSError(errno.EROFS, "no", "f"), "writing f: check the disk and the rights, or write elsewhere"),
    ],
)
def test_the_advice_fits_the_cause(error, says):
    told = failures.explain(error)
    assert says in told and ("elsewhere" in told) == ("elsewhere" in says)
