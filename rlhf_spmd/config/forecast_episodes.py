"""The option forecast_episodes: how episodes are answered in forecasts and plans."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.json_text import json_value
from rlhf_spmd.files.reading import is_file, is_folder, read_lines
from rlhf_spmd.plan.workload import Answers

TURNS, TOKENS, MEAN_S, P95_S = "turns", "answer_tokens", "tool_s", "tool_p95_s"  # in the log
PROMPT_LENGTH = "prompt_length"  # there, as environments open them
DEFAULT = Answers(2.0, 0.0, 0.1, 0.3)  # but for the tokens


def read_forecast_episodes(text: str, drawn: float, length: float) -> Answers:
    """Reads the answers that a text names: TURNS,TOKENS,MEAN_S,P95_S or a run, whose iterations are averaged; if it is
    empty, two turns, and as many tokens of answers as there is room for. Raises UserError.

    drawn, length: tokens of an episode that are drawn, and all.
    """
    if not text:
        return Answers(DEFAULT.turns, length - drawn, DEFAULT.mean_s, DEFAULT.p95_s)
    answers = _of_run(text) if is_folder(text) else _of_numbers(text)
    problem = answers.problem if answers else "it is neither TURNS,TOKENS,MEAN_S,P95_S nor the folder of a run"
    if answers and answers.tokens >= length:
        problem = f"answers of {answers.tokens:g} tokens have no room in an episode of {length:g}"
    if answers is None or problem:
        raise UserError(
            f"forecast_episodes={text}: {problem}; give at least 1 turn, the tokens of an episode's answers, and the "
            "mean and the 95th percentile of the seconds of an answer, e.g. 4,200,0.5,1.5"
        )
    return answers


def _of_numbers(text: str) -> Answers | None:
    try:
        turns, tokens, mean_s, p95_s = map(float, text.split(","))
    except ValueError:
        return None
    possible = 1 <= turns < math.inf and tokens >= 0 and 0 <= mean_s <= p95_s < math.inf
    return Answers(turns, tokens, mean_s, p95_s) if possible else None


def measured(history: Sequence[Mapping[str, Any]]) -> Answers | None:
    """Averages how episodes of some iterations were answered, by the log; None without episodes. A turn may have
    several calls, which wait together."""
    rows = [row for row in history if isinstance(row.get(TURNS), float)]
    answered = [row for row in rows if isinstance(row.get(MEAN_S), float)]
    if not rows:
        return None

    def mean(name: str, of: Sequence[Mapping[str, Any]] = rows) -> float:
        found = [row[name] for row in of if isinstance(row.get(name), float)]
        return math.fsum(found) / len(found) if found else 0.0

    turns, calls = max(1.0, mean(TURNS)), mean("answers")
    each = calls / (turns - 1) if turns > 1 else 0.0  # calls of a turn that is answered
    return Answers(turns, mean(TOKENS), each * mean(MEAN_S), each * mean(P95_S, answered))


def _of_run(text: str) -> Answers:
    path = Path(text) / "metrics.jsonl"
    if not is_file(path):
        raise UserError(f"forecast_episodes={text}: the folder has no metrics.jsonl; give the folder of a run")
    try:
        rows = [json_value(line) for line in read_lines(path) if line]
    except ValueError as error:
        raise UserError(f"forecast_episodes={text}: {path} is damaged ({error}); give another run") from None
    found = measured([row for row in rows if isinstance(row, dict)])
    if found is None:
        raise UserError(f"forecast_episodes={text}: the run had no environment; give one that had")
    return found
