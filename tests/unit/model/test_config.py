"""The config.json of a model: what it means, and what is refused."""

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.config import from_hf, to_hf
from tests.unit.model.test_transformer import CASES, SMALL

LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize("case", CASES)
def test_config_survives_the_round_trip(case):
    import transformers

    family, options = CASES[case]
    values = transformers.AutoConfig.for_model(family, **SMALL | options).to_dict()
    config = from_hf(values)
    written = to_hf(config, head="lm", dtype="float32")
    assert from_hf(written) == config
    assert from_hf(transformers.AutoConfig.for_model(**written).to_dict()) == config


def test_old_configs_mean_the_same():
    """transformers 4 wrote rope_theta and rope_scaling with `type`, and left defaults out."""
    old = {"model_type": "llama", **SMALL, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"model_type": "llama", **SMALL}
    new["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    assert from_hf(old) == from_hf(new)
    assert from_hf({"model_type": "mistral", **SMALL}).sliding_window == 4096
    assert from_hf({"model_type": "qwen2", **SMALL}).sliding_layers == ()
    assert from_hf({"model_type": "qwen3", **SMALL}).head_dim == 128
    smollm3 = from_hf({"model_type": "smollm3", **SMALL, "num_hidden_layers": 9})
    assert smollm3.tie_embeddings and smollm3.layers_without_rope == (3, 7) and smollm3.rope_theta == 2e6
    gemma = from_hf({"model_type": "gemma", **SMALL, "hidden_act": "gelu"})
    assert gemma.tie_embeddings and gemma.head_dim == 256 and gemma.activation == "gelu_pytorch_tanh"
    olmo3 = from_hf({"model_type": "olmo3", **SMALL, "rope_theta": 1e6, "rope_scaling": LINEAR})
    assert olmo3.sliding_layers == (0, 1, 2) and olmo3.rope_scaling == LINEAR
    assert (olmo3.rope_theta, olmo3.local_rope_theta) == (1e6, 5e5)
    gemma3 = from_hf({"model_type": "gemma3_text", **SMALL, "num_hidden_layers": 7})
    assert gemma3.sliding_layers == (0, 1, 2, 3, 4, 6) and gemma3.sliding_window == 4096
    assert (gemma3.rope_theta, gemma3.local_rope_theta) == (1e6, 1e4)
    pythia = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"} | {"rotary_emb_base": 5000}
    pythia = from_hf({"model_type": "gpt_neox", **pythia, "rotary_pct": 0.2, "layer_norm_eps": 1e-3})
    assert (pythia.num_kv_heads, pythia.rotary_dim, pythia.rope_theta, pythia.rms_norm_eps) == (6, 2, 5000, 1e-3)
    gpt2 = from_hf({"model_type": "gpt2", "vocab_size": 9, "n_embd": 12, "n_layer": 1, "n_head": 2, "n_positions": 7})
    assert (gpt2.intermediate_size, gpt2.num_positions, gpt2.max_position_embeddings) == (48, 7, 7)
    missing = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    assert from_hf({"model_type": "llama", **missing}).num_kv_heads == 6


PHI = {"model_type": "phi3"}


def test_older_names_of_longrope():
    factors = {"short_factor": [1.0] * 5, "long_factor": [2.0] * 5}
    old, new = (PHI | SMALL | {"rope_scaling": {"type": name} | factors} for name in ("su", "longrope"))
    assert from_hf(old) == from_hf(new) and from_hf(new).rope_type == "longrope"
    assert from_hf(new).rope_scaling["original_max_position_embeddings"] == 4096


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "bloom"}, "'bloom' is not supported; supported are llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "supported are llama"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": None}, "'hidden_size' is None"),
        ({"vocab_size": "many"}, "'vocab_size' is 'many'"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"num_key_value_heads": 4}, "6 attention heads cannot share 4"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"num_attention_heads": 8, "head_dim": 8}, "not a multiple"),
        ({"quantization_config": {"bits": 4}}, "its weights are quantised .* (quantization_config); use the original"),
        ({"quantization": {"bits": 4}, "model_type": "bloom"}, "'bloom' is not supported; its weights are quantised"),
        ({"model_type": "gemma3", "vision_config": {"x": 1}}, "'gemma3' is not .*; it has a tower .*vision_config"),
        ({"vision_config": {"x": 1}}, "it has a tower for images or sounds (vision_config); use a model of text"),
        ({"model_type": "voxtral", "audio_config": {"x": 1}}, "'voxtral' .*; it has a tower .*audio_config.*; use a"),
        ({"model_type": "mamba2", "state_size": 128}, "'mamba2' .*; layers of it keep a state .*; use a model whose"),
        ({"model_type": "bamba", "mamba_d_state": 16}, "'bamba' .*; layers of it keep a state .*mamba_d_state"),
        ({"model_type": "rwkv", "rescale_every": 6}, "'rwkv' .*; layers of it keep a state"),
        ({"model_type": "qwen3_next", "linear_key_head_dim": 16, "num_experts": 8}, "'qwen3_next' .* keep a state"),
        ({"model_type": "lfm2", "layer_types": ["full_attention", "conv"]}, "'lfm2' .* (layer_types conv); use a"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 8}, "mixture of experts (n_routed_experts); .* mixtral, qw"),
        ({"model_type": "gpt_oss", "num_local_experts": 8}, "'gpt_oss' is not .* mixture .*; supported mixtures are"),
        ({"model_type": "ernie4_5_moe", "moe_num_experts": 8}, "'ernie4_5_moe' .* mixture of experts (moe_num_exp"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "positive number 'factor'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "kinds of layers"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "'no_rope_layers' must have a 1 or, for a layer"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
        (
            {"model_type": "smollm3", "sliding_window": 3, "layer_types": ["sliding_attention"] * 3},
            "'layer_types' names sliding_attention, but no window is set and used",
        ),
        ({"model_type": "granite", "logits_scaling": 0}, "'logits_scaling' is 0, but must be a positive number"),
        ({"model_type": "gemma", "hidden_act": "silu"}, "hidden_act 'silu' is not supported; .* gelu_pytorch_tanh"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        (PHI | {"partial_rotary_factor": 0.5}, "head_dim is 10, of which 0.5 are turned, but rotary positions need"),
        (PHI | {"rope_scaling": {"type": "longrope", "factor": "x"}}, "'factor' is 'x', but must be a positive number"),
        (PHI | {"partial_rotary_factor": 1.5}, "head_dim is 10, of which 1.5"),
        (
            PHI | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 5}},
            "needs 5 positive numbers 'long_factor'",
        ),
        ({"model_type": "olmo3", "sliding_window": None}, "'sliding_window' is None"),
        ({"model_type": "olmo3", "rope_parameters": {"sliding_attention": LINEAR}}, "with a window is {.*linear"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 30.0}, "attn_logit_softcapping 30.0 is not"),
        ({"model_type": "gemma3", "text_config": {}}, "model_type 'gemma3' is not supported; supported are"),
        ({"model_type": "gpt_neox", "layer_norm_eps": None}, "'layer_norm_eps' is None"),
        ({"model_type": "gpt_neox", "hidden_act": "mish"}, "hidden_act 'mish' is not supported; .*, gelu_fast, "),
        ({"model_type": "opt", "do_layer_norm_before": False}, "do_layer_norm_before False is not supported"),
        ({"model_type": "opt", "word_embed_proj_dim": 9}, "word_embed_proj_dim 9 is not supported; supported is 60"),
        ({"model_type": "gpt2", "scale_attn_weights": False}, "scale_attn_weights False is not supported"),
        ({"model_type": "gpt2", "n_head": "x"}, "'n_embd' is None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ],
)
def test_what_cannot_be_a_model_is_refused(change, words):
    with pytest.raises(UserError, match=words.replace("(", r"\(").replace(")", r"\)")):
        from_hf({"model_type": "llama", **SMALL} | change)
