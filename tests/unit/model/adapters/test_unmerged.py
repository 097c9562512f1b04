"""Adapters beside the weights: peft's logits, the folder that a run writes, and the slices of shards."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_spmd.errors import UserError
from rlhf_spmd.model import hf
from rlhf_spmd.model.adapters.config import AdapterConfig
from rlhf_spmd.model.adapters.files import PREFIX, read_adapter, write_adapter
from rlhf_spmd.model.adapters.merge import merge
from rlhf_spmd.model.adapters.uniform import adapters_in, is_adapter
from rlhf_spmd.model.adapters.unmerged import load_any, save_adapter, take_adapter
from rlhf_spmd.model.families import FAMILIES
from rlhf_spmd.model.parallel import Parallel, slice_of
from rlhf_spmd.model.texts.tokenizer_files import same_behaviour
from rlhf_spmd.plan.adapters import LINEAR_LAYERS, Adapters
from rlhf_spmd.plan.shard import Shard
from tests.folders import write_model
from tests.unit.model.adapters.test_files import ADAPTERS, logits_of

BASE = ADAPTERS / "base"
UNIFORM = ("peft-0.17-all-linear", "peft-0.17-last-names", "peft-0.21-reward")


@pytest.mark.parametrize("name", UNIFORM)
def test_the_logits_of_peft_and_the_folder_written_again(name, tmp_path):
    folder = ADAPTERS / name
    config, factors, saved = read_adapter(folder)
    tokens_BT, expected = logits_of(folder)
    first = load_any(str(folder), head=config.head, dtype=torch.float32)
    state = {key: one for key, one in first.state_dict().items() if key in first.trained_names()}
    save_adapter(state, first, tmp_path, hf.Texts(BASE), base=BASE)
    for model in (first, load_any(str(tmp_path), head=config.head, dtype=torch.float32)):
        with torch.no_grad():
            hidden = model(tokens_BT)
            got = model.logits(hidden) if config.head == "lm" else model.scalar(hidden)[:, -1:]
        torch.testing.assert_close(got.reshape(expected.shape), expected, atol=5e-5, rtol=0)
    _, again, saved_again = read_adapter(tmp_path)
    assert again.keys() == factors.keys() and saved_again.keys() == saved.keys()
    assert all(torch.equal(one, other) for path in again for one, other in zip(again[path], factors[path], strict=True))


PLAIN = {"layer_norm": True, "plain_mlp": True, "mlp_bias": True, "attention_bias": True, "attention_output_bias": True}
GELU = "gelu_pytorch_tanh"
WRITTEN = {  # family, fields of its models, where a layer is in a folder, its matrices there -> ours
    "phi3": (
        {},
        "model.layers.0.",
        {
            **{"self_attn.qkv_proj": "q_proj k_proj v_proj", "self_attn.o_proj": "o_proj"},
            **{"mlp.gate_up_proj": "gate_proj up_proj", "mlp.down_proj": "down_proj"},
        },
    ),
    "glm4": (
        {"rotary_factor": 0.5, "rope_alternates": True, "attention_bias": True, "norms": "around"},
        "model.layers.0.",
        {
            **{f"self_attn.{name}": name for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
            **{"mlp.gate_up_proj": "gate_proj up_proj", "mlp.down_proj": "down_proj"},
        },
    ),
    "gpt_neox": (
        PLAIN | {"num_kv_heads": 4, "parallel_residual": True, "activation": "gelu"},
        "gpt_neox.layers.0.",
        {
            **{"attention.query_key_value": "q_proj k_proj v_proj", "attention.dense": "o_proj"},
            **{"mlp.dense_h_to_4h": "up_proj", "mlp.dense_4h_to_h": "down_proj"},
        },
    ),
    "gpt2": (
        PLAIN | {"num_kv_heads": 4, "activation": "gelu_new", "num_positions": 64},
        "transformer.h.0.",
        {
            **{"attn.c_attn": "q_proj k_proj v_proj", "attn.c_proj": "o_proj"},
            **{"mlp.c_fc": "up_proj", "mlp.c_proj": "down_proj"},
        },
    ),
    "opt": (
        PLAIN | {"num_kv_heads": 4, "activation": "relu", "num_positions": 66},
        "model.decoder.layers.0.",
        {
            **{"fc1": "up_proj", "fc2": "down_proj", "self_attn.out_proj": "o_proj"},
            **{f"self_attn.{name}": name for name in ("q_proj", "k_proj", "v_proj")},
        },
    ),
    "starcoder2": (
        PLAIN | {"activation": GELU, "sliding_window": 5, "sliding_layers": (0, 1)},
        "model.layers.0.",
        {
            **{"mlp.c_fc": "up_proj", "mlp.c_proj": "down_proj"},
            **{f"self_attn.{name}": name for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
        },
    ),
}


@pytest.mark.parametrize("family", WRITTEN)
@pytest.mark.parametrize("targets", [LINEAR_LAYERS, ("q_proj", "v_proj", "up_proj", "down_proj")], ids=len)
def test_adapters_are_written_under_the_names_of_a_family(targets, family, tmp_path):
    """Those of matrices that are one in a folder as one."""
    fields, place, matrices = WRITTEN[family]
    base = write_model(tmp_path / "base", model_type=family, **fields)
    model = hf.load_model(base, head="lm").with_adapters(Adapters(2, 5.0, targets, rslora=len(targets) < 7))
    state = {key: one for key, one in model.state_dict().items() if key in model.trained_names()}
    for one in state.values():
        one.normal_(generator=torch.Generator().manual_seed(1))
    save_adapter(state, model, tmp_path / "adapter", hf.Texts(base), base=base)
    layers = {path for path in read_adapter(tmp_path / "adapter")[1] if ".0." in path}
    assert layers == {place + name for name, ours in matrices.items() if {*ours.split()} & {*targets}}
    again = load_any(str(tmp_path / "adapter"), head="lm", dtype=torch.float32)
    assert again.state_dict().keys() == model.state_dict().keys() and again.adapters.scale == model.adapters.scale
    assert all(torch.equal(one, model.state_dict()[name]) for name, one in again.state_dict().items())
    merge(tmp_path / "adapter", tmp_path / "merged")
    merged, tokens_BT = hf.load_model(tmp_path / "merged", head="lm"), torch.arange(12).view(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(merged.logits(merged(tokens_BT)), model.logits(model(tokens_BT)))


@pytest.mark.parametrize("family", WRITTEN)
@pytest.mark.parametrize("listed", [True, False])
def test_adapters_of_peft_by_the_names_of_a_family(listed, family, tmp_path):
    """Of a matrix that is several of ours each has its A; a run that goes on from it writes it again with more."""
    fields, place, matrices = WRITTEN[family]
    base, draw = write_model(tmp_path / "base", model_type=family, **fields), torch.Generator().manual_seed(2)
    stored = load_file(base / "model.safetensors")
    turned = FAMILIES[family].transposed
    paths = [f"{place}{name}".replace("0", layer) for name in matrices for layer in "01"]
    sizes = {path: stored[f"{path}.weight"].shape[:: -1 if turned else 1] for path in paths}
    factors = {
        path: (torch.randn(3, num, generator=draw), torch.randn(out, 3, generator=draw))
        for path, (out, num) in sizes.items()
    }
    more = LINEAR_LAYERS  # lists for several families name them, too
    config = AdapterConfig(3, 4.0, listed, (*matrices, *more) if listed else tuple(paths), base=str(base))
    write_adapter(tmp_path / "theirs", config, factors, {})
    model, tokens_BT = load_any(str(tmp_path / "theirs"), head="lm", dtype=torch.float32), torch.arange(12).view(2, 6)
    adapters = model.adapters
    assert (adapters.rank, adapters.alpha, adapters.rslora) == (3, 4.0, listed)
    merge(tmp_path / "theirs", tmp_path / "merged")
    merged = hf.load_model(tmp_path / "merged", head="lm")
    with torch.no_grad():
        expected = merged.logits(merged(tokens_BT))
        torch.testing.assert_close(model.logits(model(tokens_BT)), expected, atol=2e-4, rtol=1e-4)
    state = {key: one for key, one in model.state_dict().items() if key in model.trained_names()}
    save_adapter(state, model, tmp_path / "ours", hf.Texts(base), base=base)
    again = load_any(str(tmp_path / "ours"), head="lm", dtype=torch.float32)
    assert again.adapters == adapters
    assert all(torch.equal(one, model.state_dict()[name]) for name, one in again.state_dict().items())
    ranks = {len(a) for a, _ in read_adapter(tmp_path / "ours")[1].values()}
    assert ranks == {3 * len(ours.split()) for ours in matrices.values()}


def test_the_folder_has_the_tokenizer_and_the_tokens_that_are_never_drawn(tmp_path):
    base = write_model(tmp_path / "base")
    for head, suppressed in (("lm", [61, 62]), ("scalar", ())):
        model = hf.load_model(base, head=head).with_adapters(Adapters(2, 4.0))
        state = {key: one for key, one in model.state_dict().items() if key in model.trained_names()}
        save_adapter(state, model, tmp_path / head, hf.Texts(base, suppressed=suppressed), base=base)
        assert same_behaviour(tmp_path / head, base) and is_adapter(tmp_path / head)
    values = json.loads((tmp_path / "lm" / "generation_config.json").read_text(encoding="utf-8"))
    assert values == json.loads((base / "generation_config.json").read_text(encoding="utf-8")) | {
        "suppress_tokens": [61, 62]
    }


@pytest.mark.parametrize("index", [0, 1])
def test_a_shard_has_its_slices(index):
    folder, shard = ADAPTERS / "peft-0.21-all-linear", Shard(tp=2, tp_index=index)
    whole = load_any(str(folder), head="lm", dtype=torch.float32).state_dict()
    part = hf.load_model(BASE, head="lm", parallel=Parallel(shard, group=SimpleNamespace(size=lambda: 2)))
    part = part.with_adapters(adapters_in(str(folder), str(BASE))[0])
    take_adapter(part, folder)
    for name, one in part.state_dict().items():
        assert torch.equal(one, whole[name][slice_of(name, part.config, shard)]), name


def test_stored_embeddings_are_refused(tmp_path):
    """Which peft writes with save_embedding_layers, without naming them in modules_to_save."""
    folder = shutil.copytree(ADAPTERS / "peft-0.17-last-names", tmp_path / "adapter")
    (tmp_path / "base").symlink_to(BASE)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[f"{PREFIX}model.embed_tokens.weight"] = hf.load_model(BASE, head="lm").state_dict()["embed_tokens.weight"]
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match="it changes model.embed_tokens.weight, which a run can't adapt; merge it"):
        load_any(str(folder), head="lm", dtype=torch.float32)


def test_factors_of_a_joint_matrix_that_no_layer_takes_are_refused(tmp_path):
    """A folder says that it has adapters of queries alone, as a run writes them, and its numbers say otherwise."""
    base = write_model(tmp_path / "base", model_type="phi3")
    factors = {
        f"model.layers.{layer}.self_attn.qkv_proj": (torch.ones(2, 32), torch.eye(64, 2).roll(shift, 0))
        for layer, shift in enumerate((3, 31))
    }
    write_adapter(tmp_path / "one", AdapterConfig(2, 4, False, ("q_proj", "qkv_proj"), base=str(base)), factors, {})
    with pytest.raises(UserError, match=r"layers\.1\.self_attn\.qkv_proj are not those of q_proj; merge it"):
        load_any(str(tmp_path / "one"), head="lm", dtype=torch.float32)
