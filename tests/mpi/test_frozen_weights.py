"""Inference with weights that ZeRO 3 shards, one layer after another, against the whole model.

python tests/run_mpi.py 2 4 -- tests/mpi/test_frozen_weights.py
"""

# B sequences, P prompt tokens, G response tokens

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.sequences import Sequences, forward, forward_by_layer, response_logprobs, response_values
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.engines.adamw import EngineOptions
from rlhf_spmd.runtime.engines.flat_engine import Groups
from rlhf_spmd.runtime.engines.train_engine import make_engine
from rlhf_spmd.runtime.weights.frozen_weights import ShardedCopy

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.usefixtures("cheap_garbage_collection"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]
VOCAB, LAYERS = 37, 3
PLAIN = {"temperature": 1.0, "eos_ids": (3,), "min_new_tokens": 0}


def make_model(head: str, *, tied: bool) -> Transformer:
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_layers": LAYERS, "num_heads": 4}
    config = ModelConfig("llama", **sizes, num_kv_heads=2, head_dim=4, tie_embeddings=tied)
    model = Transformer(config, head=head)
    model.init_weights(5, score_std=0.5)
    return model


def batch_of(seed: int) -> Sequences:
    draw = torch.Generator().manual_seed(seed)
    prompts_BP = torch.randint(VOCAB, (2, 4), generator=draw)
    responses_BG = torch.randint(VOCAB, (2, 5), generator=draw)
    responses_BG[0, 3:] = -1
    return Sequences.join(prompts_BP, responses_BG)


def noting(model: nn.Module, gathered: Callable, most: list[int]) -> Callable:
    """Wraps `gathered`, and notes how many numbers of the model's weights are here."""

    @contextmanager
    def noted(modules: Sequence[nn.Module]) -> Iterator[None]:
        with gathered(modules):
            most.append(sum(p.numel() for p in model.parameters()))
            yield

    return noted


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize(("head", "tied"), [("lm", True), ("lm", False), ("scalar", True)])
def test_the_same_bits_with_one_layer_at_a_time(world, make_group, head, tied, trained):
    """Ranks have different numbers of batches, the last one none; tied embeddings are read first and last."""
    group, whole = make_group(tuple(range(world.size))), make_model(head, tied=tied)
    size = sum(p.numel() for p in whole.parameters())
    besides = sum(p.numel() for module in whole.besides_layers() for p in module.parameters())
    model = make_model(head, tied=tied)
    sharded = (
        make_engine(model, groups=Groups(data=group), options=EngineOptions(zero=3))
        if trained
        else ShardedCopy(model, group=group)
    )
    batches, most = [batch_of(10 * world.rank + k) for k in range(world.size - 1 - world.rank)], []
    outputs = forward_by_layer(model, batches, noting(model, sharded.gathered, most))
    with torch.no_grad(), warnings.catch_warnings():
        if not trained:  # DeepSpeed calls collectives by old names
            warnings.simplefilter("error", FutureWarning)
        found = [read(model, batch, output) for batch, output in zip(batches, outputs, strict=True)]
        expected = [read(whole, batch, forward(whole, batch)) for batch in batches]
    assert len(found) == len(batches) == world.size - 1 - world.rank
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert most == [besides] + [besides + (size - besides) // LAYERS] * LAYERS
    assert sum(p.numel() for p in model.parameters()) == 0, "all weights are given back"


def read(model: Transformer, batch: Sequences, output: torch.Tensor) -> torch.Tensor:
    if model.head == "scalar":
        return response_values(model, batch, output)
    return response_logprobs(model, batch, output, **PLAIN)
