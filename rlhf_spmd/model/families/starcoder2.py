"""StarCoder2 (arXiv 2402.19173): LayerNorm and biases; all its layers have a sliding window, or none has."""

from rlhf_spmd.model.families.family import BIASES, Family

FAMILY = Family(
    prefix="Starcoder2",
    defaults={
        "max_position_embeddings": 4096,
        "num_key_value_heads": 2,
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "tie_word_embeddings": True,
        **{"bos_token_id": 50256, "eos_token_id": 50256},
    },
    always=("layer_norm", "plain_mlp"),
    switches={"use_bias": (*BIASES, "mlp_bias")},
    keys={"rms_norm_eps": "norm_epsilon"},
    activation=("hidden_act", "gelu_pytorch_tanh"),
    windows=("sliding_window",),
    layer_names={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
)
