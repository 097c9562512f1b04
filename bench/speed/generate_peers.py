"""Ours and transformers' way to generate the same requests with the same weights, timed in turns. Ours gives free
places to the next in line; transformers takes batches in the same order, and each lasts until its longest response has
ended.
"""

# R requests, P prompt tokens

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from bench.rows import REPOSITORY
from bench.speed.requests import Workload, by_ours, shortened
from bench.speed.roofline import elapsed_s, in_turns, medians, precision_of
from rlhf_spmd.config.model_folders import model_config_of
from rlhf_spmd.errors import UserError
from rlhf_spmd.kernels.products import use
from rlhf_spmd.model.config import from_hf, to_hf
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.workload import ModelShape
from rlhf_spmd.runtime.profile.products import of_this_machine

SMOLLM2 = ".cache/smollm2-135m/model.safetensors"
LONGEST = 2048  # tokens of a sequence
SMALL = ModelShape(8, 512, 1408, 8, 4, 64, 8192, tied=True)  # the embedded model's family, 28 M parameters


def smollm2() -> Path:
    """Returns the folder of SmolLM2-135M. Raises UserError if it is not there."""
    path = REPOSITORY / SMOLLM2
    if not path.is_file():
        raise UserError(f"{path.parent} is not there; `make {SMOLLM2}` fetches and converts it")
    return path.parent


def random_model(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> AutoModelForCausalLM:
    """Returns a model of transformers with random weights, created on its device."""
    sizes = to_hf(model_config_of(shape, shape.num_layers, LONGEST), head="lm", dtype=precision_of(dtype))
    config = AutoConfig.for_model(**sizes)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def model_of(folder: Path | None, dtype: torch.dtype) -> AutoModelForCausalLM:
    """Returns the model of a folder, or the small one, on a CPU, without ends of responses."""
    if folder is None:
        return without_ends(random_model(SMALL, dtype, torch.device("cpu")))
    return without_ends(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval())


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


class AtLength(StoppingCriteria):
    """Each row ends at its own length."""

    def __init__(self, ends_R: Tensor):
        self.ends_R = ends_R

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs) -> Tensor:
        return input_ids.shape[1] >= self.ends_R


@torch.no_grad()
def by_transformers(theirs: AutoModelForCausalLM, work: Workload, **options) -> None:
    """Generates by transformers. Only the tokens up to each row's length count."""
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


def timed(calls: Mapping[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Measures the median seconds of each call, in turns."""
    return medians(in_turns({name: partial(elapsed_s, call) for name, call in calls.items()}, repeats))


def compare(work: Workload, theirs, mine: Transformer, *, repeats: int, options: Mapping[str, dict]) -> dict:
    """Measures the row of one workload.

    options: of transformers' `generate`, for each way to call it.
    """
    calls = {"ours": partial(by_ours, mine, work)}
    calls |= {name: partial(by_transformers, theirs, work, **more) for name, more in options.items()}
    brief = shortened(work, 2)
    by_ours(mine, brief)
    for more in options.values():
        by_transformers(theirs, work if more else brief, **more)  # a static cache compiles for its own length
    return row_of(work, mine.dtype, timed(calls, repeats))


def row_of(work: Workload, dtype: torch.dtype, seconds: dict[str, float]) -> dict:
    """Returns the row of one workload.

    seconds: of each way, ours among them.
    """
    tokens, peers_s = work.num_tokens, {name: taken_s for name, taken_s in seconds.items() if name != "ours"}
    return {
        "dtype": precision_of(dtype),
        "work": work.name,
        "requests": len(work.lengths),
        "places": work.places,
        "tokens": tokens,
        "mean_length": tokens / len(work.lengths),
        "ours_s": seconds["ours"],
        "ours_tokens_per_s": tokens / seconds["ours"],
        "peers_s": peers_s,
        "peers_tokens_per_s": {name: tokens / taken_s for name, taken_s in peers_s.items()},
        "ratio": min(peers_s.values()) / seconds["ours"],
    }
