"""Linear layers whose weights are joined where they lie."""

import torch

from rlhf_spmd.model.hf import load_model, save_state
from rlhf_spmd.model.linear import Copies
from tests.unit.kernels.test_products import small


def test_half_precision_joins_where_weights_lie(tmp_path):
    """Of a model that is initialised, and of one that is loaded."""
    made = small(torch.bfloat16)
    save_state(made.state_dict(), made.config, "lm", tmp_path)
    loaded = load_model(tmp_path, head="lm", dtype=torch.bfloat16)
    for model in (made, loaded):
        joined = Copies(model).joined
        for layer in model.layers.values():
            qkv, attention = joined.qkv[layer.self_attn.layer][0], layer.self_attn
            parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
            assert torch.equal(qkv, torch.cat(parts)) and qkv.data_ptr() == parts[0].data_ptr()
            gate_up, parts = joined.gate_up[layer.mlp.layer][0], [layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]
            assert torch.equal(gate_up, torch.cat(parts)) and gate_up.data_ptr() == parts[0].data_ptr()
    assert Copies(small(torch.float32)).joined is None
    loaded.layers["1"].mlp.up_proj.weight.data = parts[1].clone()
    assert Copies(loaded).joined is None  # that would take a copy
