"""What `check` reads of reward functions and data."""

import json

from rlhf_spmd.command_line import checks
from rlhf_spmd.config.presets import load
from rlhf_spmd.runtime.data import readers


def test_columns_are_looked_for_in_the_first_rows(tmp_path, monkeypatch):
    """And in all rows only where a function asks for one that the first lack."""
    rows = [{"prompt": "a", "answer": "b"}] * 200 + [{"prompt": "a", "late": "c"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    function = "def {0}(prompts, responses, {0}): return [0.0] * len(prompts)\n"
    (tmp_path / "rewards.py").write_text(function.format("answer") + function.format("late"), encoding="utf-8")
    limits, read = [], readers.read_records

    def recorded(*arguments, most=None, **how):
        limits.append(most)
        return read(*arguments, most=most, **how)

    monkeypatch.setattr(readers, "read_records", recorded)
    config = load("tiny", [f"data.prompts={tmp_path / 'rows.jsonl'}"], algorithm="grpo")
    for name, expected in (("answer", [100]), ("late", [100, None])):
        limits.clear()
        checks._check_reward(f"{tmp_path / 'rewards.py'}:{name}", config, is_readable=True)
        assert limits == expected
