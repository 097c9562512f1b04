"""The folder of a model: the sizes that follow from its config.json, and what is wrong with one."""

import dataclasses
import json

import pytest

from rlhf_spmd.config.model_folders import shape_of_folder
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.config import ModelConfig, to_hf
from rlhf_spmd.model.transformer import Transformer

SMALL = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_layers": 3, "num_heads": 4, "head_dim": 6}


FAMILIES = [
    {"model_type": "llama", "num_kv_heads": 4},
    {"model_type": "llama", "num_kv_heads": 2, "attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    {"model_type": "mistral", "num_kv_heads": 2, "head_dim": 8},
    {"model_type": "qwen2", "num_kv_heads": 1, "attention_bias": True},
    {"model_type": "qwen3", "num_kv_heads": 2, "head_dim": 10, "qk_norm": True},
    {"model_type": "olmo2", "num_kv_heads": 2, "qk_norm": True, "qk_norm_of_all": True, "norms": "after"},
    {"model_type": "qwen3", "num_kv_heads": 4, "qk_norm": True, "attention_bias": True, "attention_output_bias": True},
    {
        **{"model_type": "gpt2", "num_kv_heads": 4, "layer_norm": True, "plain_mlp": True, "mlp_bias": True},
        **{"attention_bias": True, "attention_output_bias": True, "activation": "gelu_new"},
        **{"max_position_embeddings": 30, "num_positions": 30},
    },
    {
        **{"model_type": "opt", "num_kv_heads": 4, "layer_norm": True, "plain_mlp": True, "activation": "relu"},
        **{"max_position_embeddings": 30, "num_positions": 32},
    },
    {
        **{"model_type": "gpt_neox", "num_kv_heads": 4, "layer_norm": True, "plain_mlp": True, "mlp_bias": True},
        "activation": "gelu",
    },
    {"model_type": "glm4", "num_kv_heads": 2, "attention_bias": True, "norms": "around", "rope_alternates": True},
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family['model_type']}-{len(family)}")
def test_parameters_are_counted_as_the_model_makes_them(family, tied, tmp_path):
    model_config = ModelConfig(**(SMALL | family), tie_embeddings=tied)
    (tmp_path / "config.json").write_text(json.dumps(to_hf(model_config, head="lm", dtype="float32")), encoding="utf-8")
    shape = shape_of_folder(str(tmp_path))
    for head in ("lm", "scalar"):
        model = Transformer(model_config, head=head, device="meta")
        count = sum(parameter.numel() for parameter in model.parameters())
        assert dataclasses.replace(shape, scalar_head=head == "scalar").num_params == count


@pytest.fixture
def folder(tmp_path) -> str:
    model_config = ModelConfig(**(SMALL | FAMILIES[0]))
    (tmp_path / "config.json").write_text(json.dumps(to_hf(model_config, head="lm", dtype="float32")), encoding="utf-8")
    return str(tmp_path)


JUNK = (None, "x", "", [], ["x"], [[]], {}, {"a": {}}, 2.5, -1, 0, True, False, float("nan"), float("inf"), 10**400)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_junk_in_a_config_json_is_a_model_or_an_error_that_names_file_and_key(tmp_path, family):
    sizes = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3}
    good = {"model_type": family, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6} | sizes
    rope = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 9}
    good |= {"rope_scaling": {"rope_type": "llama3"} | rope, "use_sliding_window": True, "sliding_window": 5}
    more = ("rms_norm_eps", "rope_theta", "rope_parameters", "partial_rotary_factor", "max_position_embeddings")
    more += ("layer_types", "max_window_layers", "hidden_act", "eos_token_id", "bos_token_id", "pad_token_id")
    cases = [(key, good | {key: junk}) for key in (*good, *more) for junk in JUNK]
    for key in ("rope_type", "rope_theta", "attention_factor", *rope):
        cases += [(key, good | {"rope_scaling": good["rope_scaling"] | {key: junk}}) for junk in JUNK]
    for key, values in cases:
        (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
        try:
            shape_of_folder(str(tmp_path))
        except UserError as error:
            text = str(error).replace("rope type", "rope_type")
            assert text.startswith(f"{tmp_path}/config.json: "), values
            words = (key, "rope_scaling", "kv_heads", "attention heads", "is 0, but", "is -1, but")
            assert any(word in text for word in words), (values, text)
