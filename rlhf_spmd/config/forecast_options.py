"""The options forecast_lengths and forecast_episodes: how long responses are, and how episodes are answered, in
forecasts and plans."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.data_files import CSV, TABLES, kind_of_file, read_data
from rlhf_spmd.files.json_text import json_value, numbered_values
from rlhf_spmd.files.reading import is_file, is_folder, paths_in
from rlhf_spmd.plan.workload import Answers, ResponseLengths

ROLLOUT_TOKENS = "response_tokens"  # of a rollout
TURNS, TOKENS, MEAN_S, P95_S = "turns", "answer_tokens", "tool_s", "tool_p95_s"  # in the log
PROMPT_LENGTH = "prompt_length"  # there, as environments open them
DEFAULT = Answers(2.0, 0.0, 0.1, 0.3)  # but for the tokens


def read_forecast_lengths(text: str, limit: int) -> ResponseLengths | None:
    """Returns the distribution that a text names: MEAN or MEAN,SIGMA of a lognormal, or rollouts; None if it is empty.
    limit: the most tokens of a response. Raises UserError.
    """
    if not text:
        return None
    try:
        if is_file(text) or is_folder(text):
            return ResponseLengths.of(min(limit, max(1, tokens)) for tokens in _rollout_tokens(Path(text)))
        mean, sigma, *others = [float(number) for number in (text if "," in text else f"{text},0").split(",")]
        if mean > limit:
            raise ValueError(f"{mean:g} is above {limit}")
        if others or not (mean > 1 and 0 <= sigma < math.inf):
            raise ValueError("these are not two such numbers")
        return ResponseLengths(mean, sigma)
    except ValueError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"forecast_lengths={text}: {reason}; give the mean of responses, above 1 and at most "
            f"generation.max_new_tokens={limit}, and the standard deviation of their logarithm, e.g. "
            f"{max(2, limit // 2)},0.8; or a file or folder of rollouts (RUN/rollouts/iteration-N)"
        ) from None


def _rollout_tokens(path: Path) -> list[int]:
    """Returns the number of tokens of each response of rollouts. Raises ValueError if there are none."""
    parts = paths_in(path, "part-*") if is_folder(path) else [path]
    rows = [row for part in parts for row in _rows_of(part)]
    if not rows or not all(isinstance(row, dict) and isinstance(row.get(ROLLOUT_TOKENS), list) for row in rows):
        raise ValueError(f"there are no rows with lists of {ROLLOUT_TOKENS}")
    return [len(row[ROLLOUT_TOKENS]) for row in rows]


def _rows_of(path: Path) -> Iterator[Any]:
    """Yields the rows of a table, or of JSON: a list, or one on each line. Raises ValueError, for JSON with file and
    line."""
    kind = kind_of_file(path)
    if kind in (CSV, *TABLES):
        from pyarrow import dataset

        yield from dataset.dataset(path, format=kind.removeprefix(".")).to_table().to_pylist()
        return
    content = read_data(path).strip()
    is_list = kind == ".json" and content.startswith(b"[")
    for number, text in enumerate([content] if is_list else content.splitlines(), start=1):
        try:
            value = json_value(text)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not valid JSON: {error}") from None
        yield from value if is_list else [value]


def read_forecast_episodes(text: str, drawn: float, length: float) -> Answers:
    """Returns the answers that a text names: TURNS,TOKENS,MEAN_S,P95_S or a run, whose iterations are averaged; if it
    is empty, two turns, and as many tokens of answers as there is room for. Raises UserError.

    drawn, length: tokens of an episode that are drawn, and all.
    """
    if not text:
        return Answers(DEFAULT.turns, length - drawn, DEFAULT.mean_s, DEFAULT.p95_s)
    if is_folder(text):
        rows = [row for _, row in numbered_values(Path(text) / "metrics.jsonl") if isinstance(row, dict)]
        answers, problem = measured(rows), "the folder has no metrics of a run with an environment"
    else:
        answers, problem = _answers_of(text), "it is neither TURNS,TOKENS,MEAN_S,P95_S nor the folder of a run"
    if answers:
        problem = answers.problem
    if answers and answers.tokens >= length:
        problem = f"answers of {answers.tokens:g} tokens have no room in an episode of {length:g}"
    if answers is None or problem:
        raise UserError(
            f"forecast_episodes={text}: {problem}; give at least 1 turn, the tokens of an episode's answers, and the "
            "mean and the 95th percentile of the seconds of an answer, e.g. 4,200,0.5,1.5"
        )
    return answers


def _answers_of(text: str) -> Answers | None:
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

    def mean(name: str, rows: Sequence[Mapping[str, Any]] = rows) -> float:
        numbers = [row[name] for row in rows if isinstance(row.get(name), float)]
        return math.fsum(numbers) / len(numbers) if numbers else 0.0

    turns, calls = max(1.0, mean(TURNS)), mean("answers")
    each = calls / (turns - 1) if turns > 1 else 0.0  # calls of a turn that is answered
    return Answers(turns, mean(TOKENS), each * mean(MEAN_S), each * mean(P95_S, answered))
