"""Passes through the data set as the length of a run: data.epochs, from which its number of iterations follows."""

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from rlhf_spmd.config.options import Config


def in_iterations(config: Config, num_rows: int, num_steps: Callable[[Fraction], int] | None = None) -> Config:
    """Converts data.epochs to iterations; returns the config unchanged without data.epochs.

    num_rows: of the set.
    num_steps: optimizer steps that read so many rows; None: each reads mini_batch rows.
    """
    if not config.data.epochs:
        return config
    rows = num_read(config, num_rows)
    num = rows / config.rollout_batch
    if num_steps is not None:
        num = Fraction(num_steps(rows), config.rollout_batch // config.mini_batch)
    return replace(config, iterations=max(1, math.ceil(num)))


def num_read(config: Config, num_rows: int) -> Fraction:
    """Returns the rows that data.epochs asks for."""
    return Fraction(repr(config.data.epochs)) * num_rows


def length_of(config: Config, num_rows: int, *, at_most: bool = False) -> str:
    """Returns how long a run is, for people; empty without data.epochs. at_most: rows of the file may still be left
    out."""
    if not config.data.epochs:
        return ""
    passes = f"{config.data.epochs:g} epochs of {num_rows:,} rows"
    if config.mini_batch_tokens:
        return f"{passes} in steps of at most {config.mini_batch_tokens:,} tokens"
    iterations = in_iterations(config, num_rows).iterations
    more = math.floor(iterations * config.rollout_batch - num_read(config, num_rows))
    filled = f", the last one filled up with {more} more rows" if more else ""
    return f"{passes}: {'at most ' * at_most}{iterations:,} iterations of {config.rollout_batch}{filled}"
