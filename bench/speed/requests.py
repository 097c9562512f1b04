"""Requests of generation, and how our engine answers them. A request is a prompt of random tokens and the number of
tokens that its response has."""

# R requests, P prompt tokens, G longest response

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.kernels.philox import random_bits
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.generation.engine import Engine
from rlhf_spmd.runtime.generation.random_streams import OFFLINE
from rlhf_spmd.runtime.generation.requests import Sampling

PROMPT = 32


@dataclass(frozen=True, slots=True)
class Workload:
    """places: sequences decoded at the same time, which is transformers' batch."""

    name: str
    prompts_RP: Tensor
    lengths: tuple[int, ...]
    places: int

    @property
    def num_tokens(self) -> int:
        """The number of response tokens."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        return self.prompts_RP.shape[1] + max(self.lengths)


def to_the_limit(vocab_size: int, *, num: int, new: int, prompt: int = PROMPT) -> Workload:
    """Returns requests whose responses all have as many tokens as any may have."""
    return Workload(f"all {new} tokens", _prompts(num, prompt, vocab_size), (new,) * num, num)


def spread(vocab_size: int, *, num: int, places: int, limit: int, median: float = 40.0) -> Workload:
    """Returns lengths as responses have them, most of them far from the limit: log-normal with a sigma of 1."""
    lengths = np.random.default_rng(0).lognormal(np.log(median), 1.0, num).round().clip(1, limit).astype(int)
    return Workload(f"spread, 1-{limit}", _prompts(num, PROMPT, vocab_size), tuple(lengths.tolist()), places)


def works(vocab_size: int, *, num: int, places: int, limit: int) -> dict[str, Workload]:
    """Returns both kinds of requests, by name."""
    return {
        "limit": to_the_limit(vocab_size, num=places, new=limit),
        "spread": spread(vocab_size, num=num, places=places, limit=limit),
    }


def _prompts(num: int, length: int, vocab_size: int) -> Tensor:
    return torch.randint(3, vocab_size, (num, length), generator=torch.Generator().manual_seed(0))


def shortened(work: Workload, new: int) -> Workload:
    """Returns the same requests with at most so many tokens each: for warming up, and for a look inside."""
    lengths: Sequence[int] = [min(length, new) for length in work.lengths[: work.places]]
    return Workload(work.name, work.prompts_RP[: work.places], tuple(lengths), work.places)


def submit(engine: Engine, prompts: Sequence[Sequence[int]], lengths: Sequence[int], temperature: float = 1.0) -> range:
    """Gives an engine requests for so many tokens each, with the same random bits every time -> their numbers."""
    num = len(prompts)
    bits_RG = torch.from_numpy(random_bits(1, OFFLINE, 0, range(num), [0] * num, max(lengths)))
    return engine.submit(prompts, bits_RG, [Sampling(length, temperature=temperature) for length in lengths])


def by_ours(model: Transformer, work: Workload, *, adds_adapters: bool = False) -> None:
    """Generates by our engine.

    adds_adapters: of the engine.
    """
    engine = Engine(model, longest=work.longest, max_sequences=work.places, adds_adapters=adds_adapters)
    requests = submit(engine, work.prompts_RP.tolist(), work.lengths)
    engine.run()
    responses_RG, logprobs_RG, _ = engine.results(requests)
    assert bool((logprobs_RG[responses_RG >= 0] < 0).all())
    assert int((responses_RG >= 0).sum()) == work.num_tokens, work.name
