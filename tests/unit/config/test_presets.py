"""Presets, and the sizes that byte and cost forecasts follow from."""

import json
from typing import Annotated, get_origin

import pytest

from rlhf_spmd.config.options import Config, make_workload, resolved
from rlhf_spmd.config.presets import PRESETS, load
from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.option_tree import options_of

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
        return ",".join(map(str, value))
    return "none" if value is None else str(value)


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
