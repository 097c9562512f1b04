"""OPT (arXiv 2205.01068): learned positions, of which the first two are of no token; all sizes but 350M."""

from rlhf_spmd.model.families.family import BIASES, Family

FAMILY = Family(
    prefix="OPT",
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "enable_bias": True,
        "tie_word_embeddings": True,
        **{"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2},
    },
    always=("layer_norm", "plain_mlp"),
    switches={"enable_bias": (*BIASES, "mlp_bias")},
    keys={"intermediate_size": "ffn_dim"},
    activation=("activation_function", "relu"),
    refused=("_remove_final_layer_norm",),
    needed={
        "word_embed_proj_dim": "hidden_size",
        **{"do_layer_norm_before": True, "layer_norm_elementwise_affine": True},
    },
    positions=2,
    even_heads=True,
    names={"model": "model.decoder", "norm": "final_layer_norm"},
    layer_names={
        "input_layernorm": "self_attn_layer_norm",
        "self_attn.o_proj": "self_attn.out_proj",
        "post_attention_layernorm": "final_layer_norm",
        "mlp.up_proj": "fc1",
        "mlp.down_proj": "fc2",
    },
)
