"""A locale that lacks a character, and numbers that are zero when rounded."""

import math

import pytest

from rlhf_spmd.files.printing import formatted


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (-4e-5, "{:8.4f}", " -0.0000".replace("-0", " 0")),
        (-6e-5, "{:8.4f}", " -0.0001"),
        (-0.0, "{:.4g}", "0"),
        (-1e-9, "{:.4g}", "-1e-09"),
        (-0.0004, "{:8.1%}", "    0.0%"),
        (-0.4, "{:+.0f}", "+0"),
        (-math.inf, "{:8.4f}", "    -inf"),
        (math.nan, "{:.4g}", "nan"),
        (-10.0, "{:,.0f}", "-10"),
    ],
)
def test_no_number_is_minus_zero(value, form, text):
    assert formatted(value, form) == text
