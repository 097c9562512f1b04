"""Bound layers: the same bits, and nothing that was bound is left."""

import pytest
import torch

from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.fast_attributes import fast_attributes
from rlhf_spmd.model.transformer import Transformer


def small(**options) -> Transformer:
    sizes = {
        "num_layers": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
    }
    config = ModelConfig(model_type="llama", vocab_size=40, max_position_embeddings=32, **(sizes | options))
    return Transformer(config, head="lm", seed=1)


def attributes(model: Transformer) -> list[set[str]]:
    return [set(module.__dict__) for module in model.modules()]


@pytest.mark.parametrize("bias", [False, True])
def test_the_same_bits_and_nothing_is_left(bias):
    model, tokens_BT = (
        small(mlp_bias=bias, attention_bias=bias, attention_output_bias=bias),
        torch.arange(12).view(2, 6),
    )
    before, plain = attributes(model), model(tokens_BT)
    with fast_attributes(model):
        assert attributes(model) != before
        assert torch.equal(model(tokens_BT), plain)
        names = [name for name, _ in model.named_parameters()]
    assert attributes(model) == before
    assert names == [name for name, _ in model.named_parameters()]


def test_new_weights_count_afterwards():
    """load_state_dict with assign replaces the parameters themselves."""
    model, tokens_BT = small(), torch.arange(6)[None]
    with fast_attributes(model):
        model(tokens_BT)
    other = Transformer(model.config, head="lm", seed=2)
    model.load_state_dict(other.state_dict(), assign=True)
    with fast_attributes(model):
        assert torch.equal(model(tokens_BT), other(tokens_BT))
