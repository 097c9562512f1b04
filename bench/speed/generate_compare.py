"""Times generation by this project and by transformers alternately: the row of a workload, and its table."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from bench.speed import generate_peers as peers
from bench.speed.roofline import precision_of
from rlhf_spmd.model.transformer import Transformer


def take_turns(calls: Mapping[str, Callable[[], int]], repeats: int) -> dict[str, tuple[float, float]]:
    """Measures the median seconds of each call, and the tokens it says it made; one after the other, so that a slow
    moment of the machine falls on all alike. The order changes with each round."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    tokens: dict[str, int] = {}
    for number in range(repeats):
        for name in list(calls)[:: 1 if number % 2 == 0 else -1]:
            started = time.perf_counter()
            tokens[name] = calls[name]()
            seconds[name].append(time.perf_counter() - started)
    return {name: (statistics.median(found), tokens[name]) for name, found in seconds.items()}


def compare(work: peers.Workload, theirs, mine: Transformer, *, repeats: int, options: Mapping[str, dict]) -> dict:
    """Measures the row of one workload.

    options: of transformers' `generate`, for each way to call it.
    """
    calls = {"ours": lambda: peers.by_ours(mine, work)}
    calls |= {name: lambda more=more: peers.by_transformers(theirs, work, **more) for name, more in options.items()}
    brief = peers.shortened(work, 2)
    peers.by_ours(mine, brief)
    for more in options.values():
        peers.by_transformers(theirs, work if more else brief, **more)  # a static cache compiles for its own length
    return row_of(work, mine.dtype, take_turns(calls, repeats))


def row_of(work: peers.Workload, dtype: torch.dtype, found: dict[str, tuple[float, float]]) -> dict:
    """Returns the row of one workload.

    found: from take_turns, ours among it.
    """
    ours_s, tokens = found.pop("ours")
    assert tokens == work.num_tokens and all(count == tokens for _, count in found.values()), (work.name, tokens)
    return {
        "dtype": precision_of(dtype),
        "work": work.name,
        "requests": len(work.lengths),
        "places": work.places,
        "tokens": tokens,
        "mean_length": tokens / len(work.lengths),
        "ours_s": ours_s,
        "ours_tokens_per_s": tokens / ours_s,
        "peers_s": {name: taken_s for name, (taken_s, _) in found.items()},
        "peers_tokens_per_s": {name: tokens / taken_s for name, (taken_s, _) in found.items()},
        "ratio": min(taken_s for taken_s, _ in found.values()) / ours_s,
    }
