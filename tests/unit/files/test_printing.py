"""A locale that lacks a character."""

import json
import sys


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
