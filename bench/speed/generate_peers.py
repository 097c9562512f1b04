"""Ours and transformers' way to generate the same requests with the same weights, which `bench generate` times.

A request is a prompt of random tokens and the number of tokens that its response has. Ours gives free places to the
next in line; transformers takes batches in the same order, and each lasts until its longest response has ended.
"""

# R requests, P prompt tokens, G longest response

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from bench.speed.roofline import precision_of
from rlhf_spmd.config.model_folders import model_config_of
from rlhf_spmd.kernels.philox import random_bits
from rlhf_spmd.kernels.products import use
from rlhf_spmd.model.config import from_hf, to_hf
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.workload import ModelShape
from rlhf_spmd.runtime.generation.engine import Engine
from rlhf_spmd.runtime.generation.random_streams import OFFLINE
from rlhf_spmd.runtime.generation.requests import Sampling
from rlhf_spmd.runtime.profile.products import of_this_machine

PROMPT = 32
LONGEST = 2048  # tokens of a sequence
SMALL = ModelShape(8, 512, 1408, 8, 4, 64, 8192, tied=True)  # the embedded model's family, 28 M parameters


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


def random_model(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> AutoModelForCausalLM:
    """Returns a model of transformers with random weights, created on its device."""
    sizes = to_hf(model_config_of(shape, shape.num_layers, LONGEST), head="lm", dtype=precision_of(dtype))
    config = AutoConfig.for_model(**sizes)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def without_ends(theirs: AutoModelForCausalLM) -> AutoModelForCausalLM:
    """Turns off end tokens: the requests give the lengths of responses."""
    theirs.generation_config.eos_token_id = None
    theirs.generation_config.pad_token_id = 0
    return theirs


def same_weights(theirs: AutoModelForCausalLM, dtype: torch.dtype) -> Transformer:
    """Makes our model around the very tensors of theirs."""
    config = from_hf(theirs.config.to_dict())
    mine = Transformer(config, head="lm", dtype=dtype, device="meta")
    state = {name.removeprefix("model."): weight for name, weight in theirs.state_dict().items()}
    if config.tie_embeddings:
        state.pop("lm_head.weight", None)
    mine.load_state_dict(state, assign=True)
    return mine.eval().requires_grad_(False)


def use_fastest(dtype: torch.dtype) -> str:
    """Chooses the library of products, as a run does -> its name."""
    name = precision_of(dtype)
    choice = of_this_machine(name)
    use({name: choice})
    return choice.library


def by_ours(model: Transformer, work: Workload, *, adds_adapters: bool = False) -> int:
    """Generates by our engine. Returns the tokens.

    adds_adapters: of the engine.
    """
    engine = Engine(model, longest=work.longest, max_sequences=work.places, adds_adapters=adds_adapters)
    num = len(work.lengths)
    bits_RG = torch.from_numpy(random_bits(1, OFFLINE, 0, range(num), [0] * num, max(work.lengths)))
    requests = engine.submit(work.prompts_RP.tolist(), bits_RG, [Sampling(length) for length in work.lengths])
    engine.run()
    responses_RG, logprobs_RG, _ = engine.results(requests)
    assert bool((logprobs_RG[responses_RG >= 0] < 0).all())
    return int((responses_RG >= 0).sum())


class AtLength(StoppingCriteria):
    """Each row ends at its own length."""

    def __init__(self, ends_R: Tensor):
        self.ends_R = ends_R

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs) -> Tensor:
        return input_ids.shape[1] >= self.ends_R


@torch.no_grad()
def by_transformers(theirs: AutoModelForCausalLM, work: Workload, **options) -> int:
    """Generates by transformers. Returns the tokens that count: those up to each row's length."""
    tokens = 0
    for start in range(0, len(work.lengths), work.places):
        part = slice(start, start + work.places)
        prompts_RP = work.prompts_RP[part].to(theirs.device)
        width, lengths = prompts_RP.shape[1], work.lengths[part]
        ends_R = torch.tensor(lengths, device=theirs.device) + width
        found = theirs.generate(
            prompts_RP,
            attention_mask=torch.ones_like(prompts_RP),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max(work.lengths),
            stopping_criteria=StoppingCriteriaList([AtLength(ends_R)]),
            **options,
        )
        assert found.shape[1] == width + max(lengths), "the batch lasts until its longest response has ended"
        tokens += sum(lengths)
    return tokens


def shortened(work: Workload, new: int) -> Workload:
    """Returns the same requests with at most so many tokens each: for warming up, and for a look inside."""
    lengths: Sequence[int] = [min(length, new) for length in work.lengths[: work.places]]
    return Workload(work.name, work.prompts_RP[: work.places], tuple(lengths), work.places)
