"""Presets, and the sizes that byte and cost forecasts follow from."""

import dataclasses
import json
from typing import Annotated, get_origin

import pytest

from rlhf_spmd.config.options import Config, make_workload, resolved
from rlhf_spmd.config.presets import PRESETS, load
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.pages.option_tree import options_of
from rlhf_spmd.plan.workload import ModelShape

LLAMA_BILLIONS = {"llama-7b": 6.738, "llama-13b": 13.016, "llama-33b": 32.529, "llama-65b": 65.286, "llama-70b": 68.977}
QWEN_BILLIONS = {  # arXiv 2412.15115, table 1, and the index files of the models
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-1.5b": 1.544,
    "qwen2.5-7b": 7.616,
    "qwen2.5-14b": 14.770,
    "qwen2.5-32b": 32.764,
}


def refused(*overrides: str, preset: str = "tiny") -> str:
    with pytest.raises(UserError) as error:
        load(preset, overrides)
    return str(error.value)


# ---- presets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_builds_and_is_sound(preset):
    """Through all types and ranges too: each value is read back from its own text."""
    config = load(preset)
    assert config.preset == preset
    assert json.loads(json.dumps(resolved(config))) == resolved(config)
    texts = [f"{key}={text_of(config, key)}" for key in options_of(config) if key != "preset"]
    assert load(preset, texts) == config


def value_of(config: Config, key: str):
    return config.strategy if key == "strategy" else options_of(config)[key].value


def text_of(config: Config, key: str) -> str:
    value = value_of(config, key)
    if isinstance(value, tuple):
        return ",".join(value)
    return "none" if value is None else str(value)


def test_presets_keep_their_hands_off_each_other():
    assert load("tiny") == load("tiny") and load("tiny").strategy is not load("tiny").strategy
    with pytest.raises(dataclasses.FrozenInstanceError):
        load("tiny").iterations = 3
    with pytest.raises((AttributeError, TypeError)):
        load("tiny").unknown = 3


@pytest.mark.parametrize(("preset", "hint"), [("tniy", "tiny"), ("llama-7", "llama-7b"), ("smollm", "smollm2")])
def test_an_unknown_preset_suggests_one(preset, hint):
    text = refused(preset=preset)
    assert f"{preset!r}" in text and f"did you mean {hint!r}" in text and all(name in text for name in PRESETS)


def test_a_model_folder_replaces_actor_and_reference_and_any_shape():
    config = load("llama-7b", model="some/folder")
    assert (config.models["actor"], config.models["reference"], config.shape) == ("some/folder", "", "")
    assert load("tiny", model="some/folder").models["reward"] == load("tiny").models["reward"]


# ---- overrides -----------------------------------------------------------------------------------------------------


def bare(hint):
    """Returns a type without what limits it."""
    return hint.__origin__ if get_origin(hint) is Annotated else hint


# ---- workloads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", LLAMA_BILLIONS)
def test_llama_presets_have_the_published_sizes(preset):
    workload = make_workload(load(preset))
    assert workload.models["actor"].num_params / 1e9 == pytest.approx(LLAMA_BILLIONS[preset], abs=1e-3)
    assert workload.models["actor"] == workload.models["reference"]
    scalar = workload.models["actor"].num_params - 32000 * workload.models["actor"].hidden_size
    for name in ("critic", "reward"):
        assert workload.models[name].num_params == scalar + workload.models["actor"].hidden_size
    assert workload.param_bytes == 2 and workload.num_mini_batches == 4


@pytest.mark.parametrize("preset", QWEN_BILLIONS)
def test_qwen_presets_have_the_published_sizes(preset):
    models = make_workload(load(preset)).models
    assert models["actor"].num_params / 1e9 == pytest.approx(QWEN_BILLIONS[preset], abs=1e-3)
    assert models["actor"].tied == (models["actor"].vocab_size == 151936) and models["critic"].scalar_head


def test_llama_7b_to_the_last_parameter():
    assert make_workload(load("llama-7b")).models["actor"].num_params == 6_738_415_616


def test_large_models_are_counted_alike():
    """The same for llama-7b itself, whose parameters the meta device makes without memory."""
    shape: ModelShape = make_workload(load("llama-7b")).models["actor"]
    sizes = {name: getattr(shape, name) for name in ("num_layers", "hidden_size", "intermediate_size", "num_heads")}
    sizes |= {"num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim, "vocab_size": shape.vocab_size}
    model = Transformer(ModelConfig(model_type="llama", **sizes), head="lm", device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.num_params
