"""The option forecast_lengths: how long responses are in forecasts and plans."""

import math
import re
from pathlib import Path

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import is_file, is_folder, paths_in
from rlhf_spmd.plan.workload import ResponseLengths
from rlhf_spmd.runtime.data.readers import read_records

NUMBERS = re.compile(r"[0-9.eE+]+(,[0-9.eE+]+)?")
TOKENS = "response_tokens"  # of a rollout


def read_forecast_lengths(text: str, limit: int) -> ResponseLengths | None:
    """Returns the distribution that a text names: MEAN or MEAN,SIGMA of a lognormal, or rollouts; None if it is empty.
    limit: the most tokens of a response. Raises UserError.
    """
    if not text:
        return None
    if NUMBERS.fullmatch(text):
        return _lognormal(text, limit)
    if not (is_file(text) or is_folder(text)):
        raise UserError(
            f"forecast_lengths={text} is neither MEAN or MEAN,SIGMA, e.g. 300,0.8, nor a file or folder of rollouts "
            "(RUN/rollouts/iteration-N); correct it"
        )
    paths = paths_in(Path(text), "part-*") if is_folder(text) else [Path(text)]
    try:
        made = [row[TOKENS] for path in paths for _, row in read_records(path, TOKENS, ())]
    except UserError as error:
        raise UserError(
            f"forecast_lengths={text}: give rollouts of this program, in JSONL or Parquet ({error})"
        ) from None
    if not made or not all(isinstance(tokens, list) for tokens in made):
        raise UserError(f"forecast_lengths={text} has no rows with lists of {TOKENS}; give rollouts of this program")
    return ResponseLengths.of(min(limit, max(1, len(tokens))) for tokens in made)


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
