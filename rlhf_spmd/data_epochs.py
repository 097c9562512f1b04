"""Passes through the data set as the length of a run: data.epochs, from which its number of iterations follows."""

import math
from dataclasses import replace
from fractions import Fraction

from rlhf_spmd.config import Config


def in_iterations(config: Config, num_rows: int) -> Config:
    """The config with the iterations that its data.epochs are; without data.epochs as it is. num_rows: of the set."""
    if not config.data.epochs:
        return config
    return replace(config, iterations=max(1, math.ceil(num_read(config, num_rows) / config.rollout_batch)))


def num_read(config: Config, num_rows: int) -> Fraction:
    """The rows that data.epochs asks for."""
    return Fraction(repr(config.data.epochs)) * num_rows


def length_of(config: Config, num_rows: int, *, at_most: bool = False) -> str:
    """How long a run is, for people; empty without data.epochs. at_most: rows of the file may still be left out."""
    if not config.data.epochs:
        return ""
    made = in_iterations(config, num_rows)
    more = math.floor(made.iterations * config.rollout_batch - num_read(config, num_rows))
    passes = f"{config.data.epochs:g} epoch{'s' * (config.data.epochs != 1)} of {num_rows:,} rows"
    limit = "at most " if at_most else ""
    each = f"{limit}{made.iterations:,} iteration{'s' * (made.iterations != 1)} of {config.rollout_batch}"
    filled = f", the last one filled up with {more} row{'s' * (more != 1)} of another epoch" if more else ""
    return f"{passes}: {each}{filled}"
