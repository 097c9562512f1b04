"""The table of weights against the transformer's own parameters; what a shard and a ZeRO-3 part hold of each."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.parallel import slice_of
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.program.tensors import Holding, numbers_in, weights_of
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.plan.workload import ModelShape
from tests.reallocations import local_shapes

LLAMA = ModelConfig(
    "llama",
    vocab_size=13,
    hidden_size=12,
    intermediate_size=7,
    num_layers=3,
    num_heads=6,
    num_kv_heads=3,
    head_dim=2,
)
FAMILIES = {
    "llama": LLAMA,
    "llama, tied": dataclasses.replace(LLAMA, tie_embeddings=True),
    "llama, every bias": dataclasses.replace(LLAMA, attention_bias=True, attention_output_bias=True, mlp_bias=True),
    "qwen2": dataclasses.replace(LLAMA, model_type="qwen2", attention_bias=True),
    "qwen3": dataclasses.replace(LLAMA, model_type="qwen3", qk_norm=True, head_dim=4, tie_embeddings=True),
    "norms after": dataclasses.replace(LLAMA, model_type="olmo2", norms="after"),
    "norms before and after": dataclasses.replace(LLAMA, norms="both", tie_embeddings=True),
    "gpt_neox": dataclasses.replace(
        LLAMA, model_type="gpt_neox", layer_norm=True, plain_mlp=True, activation="gelu", mlp_bias=True
    ),
    "gpt2": dataclasses.replace(
        LLAMA, model_type="gpt2", layer_norm=True, plain_mlp=True, activation="gelu_new", num_positions=9
    ),
    "mixture": dataclasses.replace(
        LLAMA,
        model_type="olmoe",
        qk_norm=True,
        qk_norm_of_all=True,
        num_experts=6,
        experts_per_token=2,
        expert_size=5,
        num_dense_layers=1,
    ),
}


def shape_of(config: ModelConfig, head: str) -> ModelShape:
    return ModelShape(
        config.num_layers,
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.vocab_size,
        tied=config.tie_embeddings,
        scalar_head=head == "scalar",
        qkv_bias=config.attention_bias,
        output_bias=config.attention_output_bias,
        mlp_bias=config.mlp_bias,
        qk_norm=config.qk_norm,
        qk_norm_of_all=config.qk_norm_of_all,
        norms=config.norms,
        num_positions=config.num_positions,
        layer_norm=config.layer_norm,
        plain_mlp=config.plain_mlp,
        num_experts=config.num_experts,
        experts_per_token=config.experts_per_token,
        expert_size=config.expert_size,
        num_dense_layers=config.num_dense_layers,
    )


@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_the_transformers(family, head):
    config = FAMILIES[family]
    shape = shape_of(config, head)
    model = Transformer(config, head=head, device="meta")
    assert local_shapes(shape, Holding(Shard())) == {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert sum(numbers_in(weight.whole) for weight in weights_of(shape)) == shape.num_params


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_slices_are_those_of_the_model_package(family, tp):
    config = FAMILIES[family]
    whole = {name: p for name, p in Transformer(config, head="lm", device="meta").named_parameters()}
    for index in range(tp):
        shard = Shard(0, 1, index, tp)
        expected = {name: tuple(p[slice_of(name, config, shard)].shape) for name, p in whole.items()}
        assert local_shapes(shape_of(config, "lm"), Holding(shard)) == expected


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_grid_covers_every_number_once(data):
    """The parts of a grid (stages, slices, ZeRO-3 parts) are disjoint and make up the model, but for what tp does not
    split and tied embeddings, which whole groups hold."""
    kv_heads = data.draw(st.integers(1, 4))
    sizes = [data.draw(st.integers(1, 7)) for _ in range(4)]
    shape = ModelShape(sizes[0], sizes[1], sizes[2], kv_heads * 2, kv_heads, 2, sizes[3], tied=data.draw(st.booleans()))
    if num_experts := data.draw(st.sampled_from([0, 4, 5])):
        dense = data.draw(st.integers(0, sizes[0]))
        mixed = {"num_experts": num_experts, "experts_per_token": 2, "expert_size": 3, "num_dense_layers": dense}
        shape = dataclasses.replace(shape, **mixed)
    assert sum(numbers_in(weight.whole) for weight in weights_of(shape)) == shape.num_params
    pp, tp, parts = data.draw(st.integers(1, 3)), data.draw(st.integers(1, kv_heads)), data.draw(st.integers(1, 4))
    for weight in weights_of(shape):
        count = np.zeros((weight.layers, weight.rows, weight.columns), dtype=int)
        for stage in range(pp):
            for index in range(tp):
                for part in range(parts):
                    for layers, rows, columns in Holding(Shard(stage, pp, index, tp), part, parts).boxes(weight):
                        count[slice(*layers), slice(*rows), slice(*columns)] += 1
        stages = 2 if weight.stages == "ends" and pp > 1 else 1
        there = slice(*weight.whole[0])
        assert (count[there] == stages * (1 if weight.cut else tp)).all(), weight
        assert count.sum() == count[there].sum()
