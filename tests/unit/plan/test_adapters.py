"""Adapters: their scale, and the table of their weights beside the parameters that models have."""

from dataclasses import replace

import pytest

from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.parallel import Parallel, is_split
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.adapters import Adapters
from rlhf_spmd.plan.program.tensors import frozen_weights_of, trained_weights_of, weights_of
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.plan.workload import ModelShape

SIZES = {"num_heads": 10, "num_kv_heads": 5, "hidden_size": 30, "intermediate_size": 13, "num_layers": 4, "head_dim": 4}


def test_scale():
    assert Adapters(16, 32.0).scale == 2.0
    assert Adapters(16, 32.0, rslora=True).scale == 8.0


@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("targets", [("q_proj", "down_proj"), Adapters(1, 1.0).targets])
@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2, 0, 1), Shard(0, 1, 2, 3), Shard(1, 2, 1, 2)], ids=str)
def test_table_names_what_trains_and_what_does_not(head, targets, shard, monkeypatch):
    """Names, shapes and slices as in the parameters of a model."""
    monkeypatch.setattr(Parallel, "__post_init__", lambda self: None)  # which wants groups of the other ranks
    adapters = Adapters(3, 6.0, targets)
    shape = ModelShape(vocab_size=37, scalar_head=head == "scalar", adapters=adapters, **SIZES)
    config = ModelConfig(model_type="llama", vocab_size=37, **SIZES)
    model = Transformer(config, head=head, device="meta", parallel=Parallel(shard), adapters=adapters)
    parameters = {name: tuple(one.shape) for name, one in model.named_parameters()}
    trained = model.trained_names()
    found = {}
    for table, names in ((trained_weights_of(shape), trained), (frozen_weights_of(shape), parameters.keys() - trained)):
        of_table = {}
        for weight in table:
            if (box := weight.box(shard)) is not None:
                layers, *sides = box
                size = tuple(last - first for first, last in sides)[: weight.num_dims]
                of_table |= {name: size for _, name in weight.parameters(layers)}
                assert is_split(weight.name) == (weight.cut is not None)
        assert of_table.keys() == names
        found |= of_table
    assert found == parameters
    assert trained_weights_of(replace(shape, adapters=None)) == weights_of(shape)
