"""GPT-NeoX (arXiv 2204.06745) and Pythia (arXiv 2304.01373): attention and MLP read the same residual stream."""

from rlhf_spmd.model.families.family import BIASES, Family

FAMILY = Family(
    prefix="GPTNeoX",
    defaults={
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "rotary_pct": 0.25,
        "attention_bias": True,
        "use_parallel_residual": True,
        **{"bos_token_id": 0, "eos_token_id": 2},
    },
    always=("layer_norm", "plain_mlp", "mlp_bias"),
    switches={"attention_bias": BIASES, "use_parallel_residual": ("parallel_residual",)},
    keys={"rms_norm_eps": "layer_norm_eps", "rope_theta": "rotary_emb_base"},
    activation=("hidden_act", "gelu"),
    partial_rotary="rotary_pct",
    joint={"self_attn.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
    joint_by_head=True,
    even_heads=True,
    names={"model": "gpt_neox", "embed_tokens": "embed_in", "norm": "final_layer_norm", "lm_head": "embed_out"},
    layer_names={
        "self_attn.query_key_value": "attention.query_key_value",
        "self_attn.o_proj": "attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    computed=(".attention.bias", ".attention.masked_bias"),
)
