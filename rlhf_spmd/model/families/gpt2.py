"""GPT-2 (Radford et al., 2019): learned positions, and matrices that are stored the other way round."""

from rlhf_spmd.model.families.family import BIASES, Family

FAMILY = Family(
    prefix="GPT2",
    causal="LMHeadModel",
    defaults={
        "n_positions": 1024,
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        **{"bos_token_id": 50256, "eos_token_id": 50256},
    },
    always=("layer_norm", "plain_mlp", *BIASES, "mlp_bias"),
    keys={
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    activation=("activation_function", "gelu_new", "gelu_pytorch_tanh"),
    refused=("scale_attn_by_inverse_layer_idx", "add_cross_attention"),
    needed={"scale_attn_weights": True},
    positions=0,
    kept=("reorder_and_upcast_attn",),
    joint={"self_attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
    even_heads=True,
    names={"model": "transformer", "embed_tokens": "wte", "embed_positions": "wpe", "layers": "h", "norm": "ln_f"},
    layer_names={
        "input_layernorm": "ln_1",
        "self_attn.c_attn": "attn.c_attn",
        "self_attn.o_proj": "attn.c_proj",
        "post_attention_layernorm": "ln_2",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    },
    transposed=True,
    computed=(".attn.bias", ".attn.masked_bias"),
)
