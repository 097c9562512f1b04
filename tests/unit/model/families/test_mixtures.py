"""Folders of mixtures of experts: with a tensor for each expert or for all, from transformers and back, in shards."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_spmd.config.model_folders import write_random_model
from rlhf_spmd.errors import UserError
from rlhf_spmd.model import hf
from rlhf_spmd.model.config import from_hf, to_hf
from rlhf_spmd.model.parallel import Parallel, slice_of
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.plan.workload import SHAPES, ModelShape
from tests.folders import save_model
from tests.unit.model.test_hf import SMALL, TOKENS_BT, close, our_logits

CASES = {  # family, experts, of each token, and more
    "one of 4": ("mixtral", 4, 1, {"num_hidden_layers": 1}),
    "window, tied": ("mixtral", 8, 2, {"tie_word_embeddings": True, "sliding_window": 6, "router_aux_loss_coef": 0.02}),
    "all of 5": ("mixtral", 5, 5, {"head_dim": 10}),
    "dense first": ("qwen3_moe", 16, 4, {"mlp_only_layers": [0], "norm_topk_prob": True, "head_dim": 12}),
    "128": ("qwen3_moe", 128, 8, {"use_sliding_window": True, "sliding_window": 5}),
    "biases, tied": ("qwen3_moe", 6, 6, {"attention_bias": True, "tie_word_embeddings": True}),
    "norms of all heads": ("olmoe", 9, 3, {"output_router_logits": True}),
    "norms, tied": ("olmoe", 64, 8, {"norm_topk_prob": True, "tie_word_embeddings": True}),
}


def theirs(case):
    """Returns a random model of transformers."""
    import transformers

    family, experts, each, more = CASES[case]
    sizes = {"num_experts": experts, "num_experts_per_tok": each, "intermediate_size": 28, "pad_token_id": 0}
    more = more | ({"moe_intermediate_size": 20} if family == "qwen3_moe" else {})
    config = transformers.AutoConfig.for_model(family, **SMALL | sizes | more)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn(weight.shape)
    return model


def tensors_in(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same(ones, others):
    assert ones.keys() == others.keys()
    assert all(torch.equal(one, others[name]) for name, one in ones.items())


@pytest.mark.parametrize("case", CASES)
def test_loads_what_transformers_saved_and_back(case, tmp_path):
    import transformers

    model = theirs(case)
    model.save_pretrained(tmp_path / "theirs")
    mine = hf.load_model(tmp_path / "theirs", head="lm")
    with torch.no_grad():
        close(our_logits(mine), model(TOKENS_BT).logits)

    save_model(mine, tmp_path / "ours", max_shard_bytes=40_000)
    for path in (tmp_path / "ours").glob("*.safetensors"):
        assert sum(one.nbytes for one in load_file(path).values()) <= 40_000
    same(tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    same(again.state_dict(), model.state_dict())
    had, have = model.config.to_dict(), again.config.to_dict()
    assert {key for key in had if had[key] != have[key]} <= {"head_dim", "rope_parameters", "_name_or_path"}

    (tmp_path / "fused").mkdir()
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    fused = {name: one.clone() for name, one in model.state_dict().items() if name not in tied}
    save_file(fused, tmp_path / "fused" / "model.safetensors")
    (tmp_path / "fused" / "config.json").write_bytes((tmp_path / "theirs" / "config.json").read_bytes())
    same(hf.load_model(tmp_path / "fused", head="lm").state_dict(), mine.state_dict())


@pytest.mark.parametrize("form", ["each", "fused"])
@pytest.mark.parametrize("shard", [Shard(1, 2, 1, 2), Shard(tp=2, tp_index=1)], ids=str)
def test_a_shard_reads_its_own_experts_alone(shard, form, tmp_path, monkeypatch):
    model = theirs("dense first")
    model.save_pretrained(tmp_path)
    if form == "fused":
        save_file({name: one.clone() for name, one in model.state_dict().items()}, tmp_path / "model.safetensors")
    whole = hf.load_model(tmp_path, head="lm")
    reads = []
    read = hf.weights.read_weights
    monkeypatch.setattr(hf.weights, "read_weights", lambda *given: reads.append(read(*given)) or dict(reads[-1]))
    group = SimpleNamespace(size=lambda: shard.tp) if shard.tp > 1 else None
    part = hf.load_model(tmp_path, head="lm", parallel=Parallel(shard, group))
    state = whole.state_dict()
    same(part.state_dict(), {name: state[name][slice_of(name, whole.config, shard)] for name in part.state_dict()})
    assert sum(one.numel() for one in reads[0].values()) == sum(one.numel() for one in part.parameters())


def test_experts_that_are_there_twice_are_refused(tmp_path):
    model = theirs("all of 5")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    one = "model.layers.0.mlp.experts.down_proj"
    save_file(load_file(file) | {one: model.state_dict()[one]}, file)
    with pytest.raises(UserError, match=r"model\.safetensors: it holds .*\.experts\.down_proj and, .*experts\.0\.w2"):
        hf.load_model(tmp_path, head="lm")


def test_a_mixture_of_random_weights(tmp_path, monkeypatch):
    shape = ModelShape(2, 24, 40, 2, 2, 12, 1100, num_experts=4, experts_per_token=2, expert_size=8)
    monkeypatch.setitem(SHAPES, "small", shape)
    write_random_model(tmp_path / "model", "small", "float32")
    model = hf.load_model(tmp_path / "model", head="lm")
    experts = model.state_dict()["layers.0.mlp.experts.gate_up_proj.weight"]
    assert experts.shape == (64, 24) and experts.std() == pytest.approx(0.02, rel=0.1)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["num_local_experts"] == 4


MIXTURE = {
    **{"model_type": "qwen3_moe", **SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    **{"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1, "rope_theta": 1e6},
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts": None}, "'num_experts' is None"),
        ({"num_experts_per_tok": None}, "'num_experts_per_tok' is None"),
        ({"moe_intermediate_size": None}, "'moe_intermediate_size' is None"),
        ({"norm_topk_prob": None}, "'norm_topk_prob' is missing"),
        ({"num_experts_per_tok": 5}, "experts_per_token is 5, but must be at least 1 and at most 4"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts": 300}, "num_experts is 300, .*at most 256"),
        ({"num_local_experts": 5}, "num_experts 4 and num_local_experts 5 differ"),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers \[1\] is not supported"),
        ({"mlp_only_layers": [0, 1]}, "num_dense_layers is 2, .*at most 1"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2 is not supported"),
        ({"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size 8 is not supported"),
        ({"n_shared_experts": 1}, "n_shared_experts 1 is not supported"),
        ({"n_group": 2}, "n_group 2 is not supported"),
        ({"model_type": "olmoe", "clip_qkv": 3.0}, "clip_qkv 3.0 is not supported"),
        ({"model_type": "qwen2_moe"}, "'qwen2_moe' is not supported"),
    ],
)
def test_what_no_mixture_can_be_is_refused(change, words):
    config = from_hf(MIXTURE)
    assert from_hf(to_hf(config, head="lm", dtype="float32")) == config
    values = {key: value for key, value in (MIXTURE | change).items() if value is not None}
    with pytest.raises(UserError, match=words):
        from_hf(values)
