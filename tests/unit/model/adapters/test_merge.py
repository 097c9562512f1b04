"""Merging adapters: peft's logits, every family, what bfloat16 loses, and the sum of a base's bits."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_spmd.__main__ import main
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.errors import UserError
from rlhf_spmd.model import hf
from rlhf_spmd.model.adapters.config import AdapterConfig
from rlhf_spmd.model.adapters.files import PREFIX, read_adapter, write_adapter
from rlhf_spmd.model.adapters.merge import merge, merge_into
from rlhf_spmd.model.adapters.uniform import model_files
from rlhf_spmd.model.texts.tokenizer_files import tokenizer_files
from tests.folders import write_all, write_model, write_tokenizer
from tests.runs import load
from tests.unit.model.adapters.test_files import ADAPTERS, FOLDERS, change, logits_of

BIAS = {"model_type": "qwen2", "attention_bias": True, "tie_embeddings": True}
FAMILIES = {"llama": {"mlp_bias": True}, "mistral": {"model_type": "mistral"}, "qwen2 tied": BIAS}
FAMILIES |= {"qwen3": {"model_type": "qwen3", "qk_norm": True, "head_dim": 12}}
FAMILIES |= {"olmo2": {"model_type": "olmo2", "qk_norm": True, "qk_norm_of_all": True, "norms": "after"}}
LAYERS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


def make_adapter(folder, base, *, task="CAUSAL_LM", size=0.1):
    """Returns a random adapter of some layers of a base."""
    head = "lm" if task == "CAUSAL_LM" else "scalar"
    shapes = {name: weight.shape for name, weight in hf.load_model(base, head=head).state_dict().items()}
    draw = torch.Generator().manual_seed(1)
    factors = {}
    for name, shape in shapes.items():
        path = "model." + name.removesuffix(".weight")
        if path.endswith(LAYERS) and len(shape) == 2:
            a, b = torch.randn(3, shape[1], generator=draw), torch.randn(shape[0], 3, generator=draw)
            factors[path] = size * a, size * b
    saved = {} if head == "lm" else {"score.weight": torch.randn(1, shapes["norm.weight"][0], generator=draw)}
    config = AdapterConfig(3, 6, targets=tuple(sorted(factors)), task_type=task, base=str(base))
    write_adapter(folder, config, factors, saved)
    return config, factors, saved


@pytest.mark.parametrize("theirs", FOLDERS, ids=lambda path: path.name)
def test_the_logits_of_peft(theirs):
    config, factors, saved = read_adapter(theirs)
    tokens_BT, expected = logits_of(theirs)
    model = hf.load_model(ADAPTERS / "base", head=config.head)
    merge_into(model, config, factors, saved)
    with torch.no_grad():
        hidden = model(tokens_BT)
        got = model.logits(hidden) if config.head == "lm" else model.scalar(hidden)[:, -1:]
    torch.testing.assert_close(got.reshape(expected.shape), expected, atol=5e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("task", ["CAUSAL_LM", "SEQ_CLS"])
def test_a_whole_model_of_every_family(family, task, tmp_path):
    base = write_model(tmp_path / "base", **FAMILIES[family])
    config, factors, saved = make_adapter(tmp_path / "adapter", base, task=task)
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    assert merge(tmp_path / "adapter", tmp_path / "out").num_lost == 0
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before
    head = "lm" if task == "CAUSAL_LM" else "scalar"
    old, new = (hf.load_model(folder, head=head) for folder in (base, tmp_path / "out"))
    for name, weight in new.state_dict().items():
        path = "model." + name.removesuffix(".weight")
        expected = old.state_dict()[name]
        if path in factors:
            a, b = factors[path]
            expected = expected + 2.0 * (b @ a)
        torch.testing.assert_close(weight, saved.get(name, expected), atol=1e-6, rtol=0)
    assert hf.load_tokenizer(tmp_path / "out").vocab_size == hf.load_tokenizer(base).vocab_size


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("kind", ["lm_head", "embed_tokens", "saved lm_head", "saved embed_tokens"])
def test_embeddings_and_output(tie, kind, tmp_path, capsys):
    """An adapter changes the one that it names alone, even if the base ties them, as in peft. A run says to merge it,
    and has what that gives."""
    words, out, draw = write_all(tmp_path, tie_embeddings=tie), tmp_path / "out", torch.Generator().manual_seed(0)
    base, folder, name = tmp_path / "actor", tmp_path / "adapter", kind.rpartition(" ")[2]
    path = name if name == "lm_head" else f"model.{name}"
    config, _, _ = make_adapter(folder, base)
    tensors, about = load_file(folder / "adapter_model.safetensors"), {"modules_to_save": [name]}
    old = hf.load_model(base, head="lm").state_dict()
    old = {"lm_head.weight": old["embed_tokens.weight"]} | old
    a, b, expected = (torch.randn(shape, generator=draw) for shape in ((3, 32), (63, 3), (63, 32)))
    stored = {"weight": expected}
    if not kind.startswith("saved"):
        stored = {"lora_A.weight": a, "lora_B.weight": b}
        if name == "embed_tokens":
            stored = {"lora_embedding_A": b.T.contiguous(), "lora_embedding_B": a.T.contiguous()}
        old_one = old[path.removeprefix("model.") + ".weight"]
        stored["base_layer.weight"] = old_one.clone()
        expected, about = (old_one.double() + 2.0 * b.double() @ a.double()).float(), {}
        about["target_modules"] = [*config.targets, name]
    save_file(
        tensors | {f"{PREFIX}{path}.{end}": one for end, one in stored.items()}, folder / "adapter_model.safetensors"
    )
    change(folder, **about)
    with pytest.raises(UserError, match=f"merge it: python -m rlhf_spmd convert {folder} MERGED --merge"):
        make_workload(load(words, f"models.actor={folder}"))
    assert main(["convert", str(folder), str(out), "--merge"]) == 0, capsys.readouterr()
    new = hf.load_model(out, head="lm")
    assert not new.config.tie_embeddings
    for key in ("lm_head.weight", "embed_tokens.weight"):
        wanted = expected if key == f"{name}.weight" else old[key]
        torch.testing.assert_close(new.state_dict()[key], wanted, atol=1e-5, rtol=0)
    make_workload(load(words, f"models.actor={out}"))


def test_the_merged_model_has_what_lies_beside_the_adapter(tmp_path):
    """Its tokenizer, chat templates and generation_config.json, not those of the base, nor of an earlier merge."""
    base, folder, out = write_model(tmp_path / "base"), tmp_path / "adapter", tmp_path / "out"
    make_adapter(folder, base)
    (base / "chat_template.jinja").write_text("base", encoding="utf-8")
    merge(folder, out)
    assert (out / "chat_template.jinja").read_text(encoding="utf-8") == "base"
    write_tokenizer(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag", encoding="utf-8")
    about = {"eos_token_id": [1, 7], "suppress_tokens": [5], "temperature": 0.5}
    (folder / "generation_config.json").write_text(json.dumps(about), encoding="utf-8")
    merge(folder, out)
    assert tokenizer_files(out) == tokenizer_files(folder)
    assert json.loads((out / "generation_config.json").read_text(encoding="utf-8")) == about
    assert hf.read_config(base, model_files(str(folder), str(base)).texts).eos_token_ids == (1, 7), (
        "also where it is not merged"
    )
