"""The option forecast_lengths: how long responses are in forecasts and plans."""

import math
import re
from pathlib import Path

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.json_text import json_value
from rlhf_spmd.files.reading import is_file, is_folder, paths_in, read_lines
from rlhf_spmd.plan.workload import ResponseLengths

NUMBERS = re.compile(r"[0-9.eE+]+(,[0-9.eE+]+)?")
TOKENS = "response_tokens"  # of a rollout


def read_forecast_lengths(text: str, limit: int) -> ResponseLengths | None:
    """The distribution that a text names: MEAN or MEAN,SIGMA of a lognormal, or rollouts in JSONL; None if it is empty.
    limit: the most tokens of a response. Raises UserError."""
    if not text:
        return None
    if NUMBERS.fullmatch(text):
        return _lognormal(text, limit)
    if not (is_file(text) or is_folder(text)):
        raise UserError(
            f"forecast_lengths={text} is neither MEAN or MEAN,SIGMA, e.g. 300,0.8, nor a file or folder of rollouts "
            "(RUN/rollouts/iteration-N); correct it"
        )
    paths = paths_in(Path(text), "part-*.jsonl") if is_folder(text) else [Path(text)]
    rows = tuple(min(limit, max(1, length)) for path in paths for length in _lengths(path))
    if not rows:
        raise UserError(f"forecast_lengths={text} has no rows with {TOKENS}; give rollouts in JSONL of this program")
    return ResponseLengths(math.fsum(rows) / len(rows), rows=rows)


def _lognormal(text: str, limit: int) -> ResponseLengths:
    mean_text, _, sigma_text = text.partition(",")
    try:
        mean, sigma = float(mean_text), float(sigma_text or 0)
    except ValueError:
        mean, sigma = math.nan, math.nan
    if not (1 < mean <= limit and 0 <= sigma < math.inf):
        raise UserError(
            f"forecast_lengths={text}: the mean of responses is above 1 and at most generation.max_new_tokens={limit}, "
            "and the standard deviation of their logarithm at least 0; correct it"
        )
    return ResponseLengths(mean, sigma)


def _lengths(path: Path) -> list[int]:
    """The tokens of the responses in a file of rollouts."""
    try:
        found = [json_value(line) for line in read_lines(path) if line]
    except ValueError as error:
        raise UserError(f"forecast_lengths: {path} is not JSONL ({error}); give rollouts of this program") from None
    return [len(row[TOKENS]) for row in found if isinstance(row, dict) and isinstance(row.get(TOKENS), list)]
