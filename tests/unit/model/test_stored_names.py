"""Folders whose tensors have other names than Hugging Face's classes with a head give them, and adapters."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.config import read_config_json
from rlhf_spmd.model.hf import convert_gguf, load_model
from rlhf_spmd.model.parallel import Parallel
from rlhf_spmd.model.stored_names import hugging_face_names
from rlhf_spmd.plan.layout import Layout
from tests.folders import write_model
from tests.unit.model.test_hf import FAMILIES, SMALL, TOKENS_BT

OTHERS = {
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "DDP of that": lambda name: f"module._orig_mod.{name}",
    "compiled layers": lambda name: name.replace("layers.1.", "layers.1._orig_mod."),
    "TRL's value head": lambda name: f"pretrained_model.{name}",
    "PEFT": lambda name: f"base_model.model.{name}",
    "a field called model": lambda name: f"model.{name}",
    "FSDP and checkpointing": lambda name: name.replace(
        "model.layers.0.", "_fsdp_wrapped_module.model.layers.0._checkpoint_wrapped_module."
    ),
}
BASE = {
    "the base model": lambda name: name.removeprefix("model.") if name.startswith("model.") else None,
    "DDP of it": lambda name: name.replace("model.", "module.", 1) if name.startswith("model.") else None,
}


class Two:
    """Stands for the group of two ranks that split a model, which loading does not use."""

    def size(self) -> int:
        return 2


def rename(folder, change, more=None, *, shards=False):
    """Writes the tensors under other names, in one file or in two with an index."""
    path = folder / "model.safetensors"
    tensors = {change(name): tensor for name, tensor in load_file(path).items() if change(name)} | (more or {})
    if not shards:
        save_file(tensors, path)
        return folder
    path.unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    places = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    return folder


def same(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_names_of_a_folder_as_it_should_be_stay():
    names = ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight", "vision.embed.weight", "module.x"]
    assert hugging_face_names(names) == {name: name for name in names}
    twice = ["policy.model.embed_tokens.weight", "reference.model.embed_tokens.weight"]
    assert hugging_face_names(twice) == {name: name for name in twice}


@pytest.mark.parametrize("name", OTHERS)
def test_names_of_wrappers(name, tmp_path):
    """Of a model with a head of its own; also in shards, and a slice of it."""
    as_it_was = write_model(tmp_path / "a")
    other = rename(write_model(tmp_path / "b"), OTHERS[name], shards=len(name) % 2 == 0)
    same(load_model(as_it_was, head="lm"), load_model(other, head="lm"))
    half = {"head": "lm", "parallel": Parallel(Layout.grid_of(range(2), tp=2).shard(1), group=Two())}
    same(load_model(as_it_was, **half), load_model(other, **half))


@pytest.mark.parametrize("name", {**BASE, "torch.compile": 0})
def test_tied_models_and_scalar_heads(name, tmp_path):
    change = (BASE | OTHERS)[name]
    tied, reward = write_model(tmp_path / "a", tie_embeddings=True), write_model(tmp_path / "r", head="scalar")
    same(
        load_model(tied, head="lm"),
        load_model(rename(write_model(tmp_path / "b", tie_embeddings=True), change), head="lm"),
    )
    if name in BASE:
        with pytest.raises(UserError, match=r"is not a reward model"):
            load_model(rename(write_model(tmp_path / "s"), change), head="scalar", fresh_head=False)
        assert not load_model(tmp_path / "s", head="scalar").state_dict()["score.weight"].any()
        return
    same(
        load_model(reward, head="scalar"),
        load_model(rename(write_model(tmp_path / "s", head="scalar"), change), head="scalar"),
    )


HEADS = {  # as which model of transformers it is saved, and the name of its head there
    "TRL's value head": ("CausalLM", "v_head.summary"),
    "TRL's under another wrapper": ("CausalLM", "module.v_head.summary"),
    "a value head of OpenRLHF": ("CausalLM", "value_head"),
    "a classifier of tokens": ("TokenClassification", "score"),
    "an older one": ("TokenClassification", "classifier"),
}


def with_head(folder, name, family, bias):
    """Writes a random model of transformers with a head of one output -> the values of some tokens."""
    import transformers

    kind, layer = HEADS[name]
    config = transformers.AutoConfig.for_model(
        family, **SMALL | FAMILIES[family] | {"pad_token_id": 0, "num_labels": 1}
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(config).eval()
    model.save_pretrained(folder)
    score = getattr(model, "score", getattr(model, "classifier", None))
    weight = torch.randn(1, SMALL["hidden_size"]) if score is None else score.weight.data
    head = {f"{layer}.weight": weight} | ({f"{layer}.bias": torch.tensor([bias])} if bias is not None else {})
    rename(folder, lambda name: None if name.startswith(("score", "classifier")) else name, head)
    with torch.no_grad():
        if score is not None:
            score.bias.fill_(bias)
            return model(TOKENS_BT).logits[..., 0]
        return model(TOKENS_BT, output_hidden_states=True).hidden_states[-1] @ weight[0]  # as TRL does


FEW = ("llama", "gemma", "phi3", "granite", "ernie4_5")
NO_CLASSIFIER = ("granite", "ernie4_5", "vaultgemma", "gemma3_text", "olmo2", "olmo3", "opt")  # of tokens


@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=[] if one in FEW else pytest.mark.slow) for one in FAMILIES if " " not in one],
)
@pytest.mark.parametrize("name", HEADS)
def test_a_head_with_one_output_under_another_name(name, family, tmp_path):
    if HEADS[name][0] == "TokenClassification" and family in NO_CLASSIFIER:
        pytest.skip("transformers has no such class")
    values_BT = with_head(tmp_path, name, family, None if "OpenRLHF" in name else 0.0)
    for fresh_head in (True, False):
        mine = load_model(tmp_path, head="scalar", fresh_head=fresh_head)
        torch.testing.assert_close(mine.scalar(mine(TOKENS_BT)).detach(), values_BT, atol=1e-5, rtol=1e-5)


def test_a_head_with_a_bias_is_refused(tmp_path):
    """A language model with one is still a language model."""
    with_head(tmp_path, "TRL's value head", "llama", 0.25)
    with pytest.raises(UserError, match=r"model.safetensors: the bias v_head.summary.bias is 0.25, and .* set it to z"):
        load_model(tmp_path, head="scalar")
    load_model(tmp_path, head="lm")
    with_head(tmp_path / "t", "a classifier of tokens", "llama", 0.25)
    with pytest.raises(UserError, match=r"holds tensor score\.\w+ .* critic or reward model"):
        load_model(tmp_path / "t", head="lm")


def test_of_two_heads_that_of_a_reward_model_is_read(tmp_path):
    with_head(tmp_path, "TRL's value head", "llama", 0.5)
    rename(tmp_path, str, {"score.weight": torch.ones(1, SMALL["hidden_size"])})
    assert load_model(tmp_path, head="scalar").score.weight.eq(1).all()


@pytest.mark.parametrize("beside", ["", "config.json", "config.json and weights"])
def test_an_adapter_is_called_one(beside, tmp_path):
    """By what all verbs read first, torch-free."""
    folder = write_model(tmp_path / "a")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x/y"}), encoding="utf-8"
    )
    read_config_json(folder / "config.json")  # a merged model that has kept the description of its adapter
    (folder / "adapter_model.safetensors").touch()
    for file in ("config.json", "model.safetensors")[2 * (beside.count(" ") > 0) or beside.count("config") :]:
        (folder / file).unlink()
    expected = r"holds an adapter \(LORA\) for x/y, not a whole model; merge it: python -m rlhf_spmd convert .* --merge"
    with pytest.raises(UserError, match=expected) as error:
        read_config_json(folder / "config.json")
    assert ("remove the adapter's files" in str(error.value)) == (" " in beside)
    for read in (lambda: load_model(folder, head="lm"), lambda: convert_gguf(folder, tmp_path / "out")):
        with pytest.raises(UserError, match=expected):
            read()
