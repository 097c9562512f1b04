"""A locale that lacks a character, and numbers that are zero when rounded."""

import json
import math
import sys

import pytest

from rlhf_spmd.files.printing import formatted


def test_a_locale_that_lacks_a_character_does_not_end_a_verb(tmp_path):
    from tests.run_mpi import environment_alone, run_limited

    part = tmp_path / "rollouts" / "iteration-000000" / "part-00000.jsonl"
    part.parent.mkdir(parents=True)
    row = {"iteration": 0, "prompt_index": 0, "sample": 0, "prompt": "é", "response": "\ud83d😀"}
    part.write_text(json.dumps(row) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "rlhf_spmd", "rollouts", str(tmp_path)]
    environment = environment_alone(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    status, stdout, stderr = run_limited(command, limit_s=60, environment=environment)
    assert status == 0 and "prompt: \\xe9" in stdout, stderr
    status, stdout, stderr = run_limited([*command, "--json"], limit_s=60, environment=environment)
    assert status == 0 and json.loads(stdout) == row, stderr


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
