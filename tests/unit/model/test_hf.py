"""Hugging Face folders: what transformers saved we load, what we save transformers loads, and bad folders are named."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_spmd.errors import UserError
from rlhf_spmd.model import hf
from rlhf_spmd.model.parallel import Parallel, slice_of
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.shard import Shard
from tests.folders import save_model

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
FAMILIES = {
    "llama": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5}},
    "llama tied": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 6, "head_dim": 10},
    "qwen2 tied": {"tie_word_embeddings": True} | WINDOW,
    "qwen3": {"head_dim": 12},
    "phi3": {
        "rope_parameters": {
            **{"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
            **{"short_factor": [1.0, 1.1, 1.5], "long_factor": [1.0, 2.5, 6.0]},
        },
        **{"original_max_position_embeddings": 8, "pad_token_id": 0},
    },
    "seed_oss": {"head_dim": 8},
    "ernie4_5": {"head_dim": 12},
    "glm": {"head_dim": 16, "pad_token_id": 0, "eos_token_id": 3},
    "glm4": {"head_dim": 16, "pad_token_id": 0, "eos_token_id": 3},
    "smollm3": {"no_rope_layer_interval": 2, "pad_token_id": 0},
    "gemma": {"head_dim": 12},
    "olmo2 tied": {"tie_word_embeddings": True, "pad_token_id": 0},
    "olmo3": {"sliding_window": 4, "num_hidden_layers": 5, "pad_token_id": 0},
    "gemma2": {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 6, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 6, "num_hidden_layers": 7},
    "vaultgemma": {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 6},
    "gpt_neox": {"num_key_value_heads": 4, "rotary_pct": 0.5, "pad_token_id": 0, "hidden_act": "gelu_fast"},
    "starcoder2": {"sliding_window": 6},
    "gpt2": {"num_key_value_heads": 4, "n_inner": None, "pad_token_id": 0},
    "opt": {"num_key_value_heads": 4, "ffn_dim": 52, "pad_token_id": 0, "eos_token_id": 3},
    "granite": {"embedding_multiplier": 12, "residual_multiplier": 0.22, "logits_scaling": 8.0, "mlp_bias": True},
}
TOKENS_BT = torch.randint(3, 61, (3, 15), generator=torch.Generator().manual_seed(0))


def theirs(case: str, head: str = "lm", **more):
    """Returns a random model of transformers."""
    import transformers

    auto = transformers.AutoModelForCausalLM if head == "lm" else transformers.AutoModelForSequenceClassification
    more = ({"num_labels": 1, "pad_token_id": 0} if head == "scalar" else {}) | more
    config = transformers.AutoConfig.for_model(case.split()[0], **SMALL | FAMILIES[case] | more)
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="eager").eval()
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn(weight.shape)
    return model


@torch.no_grad()
def their_logits(folder) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return model(TOKENS_BT).logits


@torch.no_grad()
def our_logits(model: Transformer) -> torch.Tensor:
    return model.logits(model(TOKENS_BT))


def close(got, expected):
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def make_tokenizer(folder, *, pad: str | None = "<pad>") -> None:
    """Makes a word-level tokenizer with a beginning-of-sequence post-processor."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<pad>"]
    words = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(4, 61))])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token=pad
    )
    wrapped.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a causal Llama saved by transformers, with a tokenizer."""
    path = tmp_path_factory.mktemp("llama")
    theirs("llama").save_pretrained(path)
    make_tokenizer(path)
    return path


@pytest.fixture
def broken(folder, tmp_path):
    """Returns a copy of that folder, to be damaged."""
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize("case", FAMILIES)
def test_loads_what_transformers_saved_and_back(case, tmp_path):
    model = theirs(case)
    model.save_pretrained(tmp_path / "theirs")
    mine = hf.load_model(tmp_path / "theirs", head="lm")
    with torch.no_grad():
        expected = model(TOKENS_BT).logits
    close(our_logits(mine), expected)

    save_model(mine, tmp_path / "ours")
    close(their_logits(tmp_path / "ours"), expected)
    stored, written = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert stored.keys() == written.keys() and all(torch.equal(one, written[name]) for name, one in stored.items())
    again = hf.load_model(tmp_path / "ours", head="lm")
    assert again.config == mine.config
    for name, weight in again.state_dict().items():
        assert torch.equal(weight, mine.state_dict()[name]), name


@pytest.mark.parametrize("shard", [Shard(1, 2), Shard(tp=2, tp_index=1)], ids=str)
@pytest.mark.parametrize(
    ("case", "end"), [("phi3", "qkv_proj.weight"), ("gpt_neox", "query_key_value.bias"), ("gpt2", "c_attn.weight")]
)
def test_a_shard_reads_its_own_rows_of_joint_matrices_alone(case, end, shard, tmp_path, monkeypatch):
    model = theirs(case)
    model.save_pretrained(tmp_path)
    whole, reads = hf.load_model(tmp_path, head="lm"), []
    ((_, joint),) = [(name, one) for name, one in model.state_dict().items() if ".1." in name and name.endswith(end)]
    joint = joint.T if case == "gpt2" else joint
    assert torch.equal(whole.state_dict()[f"layers.1.self_attn.v_proj.{end.split('.')[1]}"][-8:], joint[-8:])
    read = hf.weights.read_weights
    monkeypatch.setattr(hf.weights, "read_weights", lambda *given: reads.append(read(*given)) or dict(reads[-1]))
    group = SimpleNamespace(size=lambda: shard.tp) if shard.tp > 1 else None
    part, state = hf.load_model(tmp_path, head="lm", parallel=Parallel(shard, group)), whole.state_dict()
    for name, one in part.state_dict().items():
        assert torch.equal(one, state[name][slice_of(name, whole.config, shard)]), name
    assert sum(one.numel() for one in reads[0].values()) == sum(one.numel() for one in part.parameters())


SLICES = [*(Shard(tp=3, tp_index=index) for index in range(3)), Shard(0, 2), Shard(1, 2), Shard(1, 2, 1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES)
def test_shards_of_every_family_are_slices(case, tmp_path):
    sizes = {"num_attention_heads": 6, "hidden_size": 48, "word_embed_proj_dim": 48}
    keys = {"num_key_value_heads": 6 if "num_key_value_heads" in FAMILIES[case] else 3}
    theirs(case, **sizes, **keys).save_pretrained(tmp_path)
    whole = hf.load_model(tmp_path, head="lm")
    for shard in SLICES:
        group = SimpleNamespace(size=lambda: shard.tp) if shard.tp > 1 else None  # noqa: B023
        part = hf.load_model(tmp_path, head="lm", parallel=Parallel(shard, group)).state_dict()
        for name, one in part.items():
            assert torch.equal(one, whole.state_dict()[name][slice_of(name, whole.config, shard)]), (shard, name)


@pytest.mark.parametrize("save_in_shards", [False, True])
def test_shards(folder, tmp_path, save_in_shards):
    if save_in_shards:
        mine = hf.load_model(folder, head="lm")
        save_model(mine, tmp_path, max_shard_bytes=20_000)
    else:
        theirs("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    mine = hf.load_model(tmp_path, head="lm")
    close(our_logits(mine), their_logits(folder))
    close(our_logits(mine), their_logits(tmp_path))

    save_model(mine, tmp_path)  # over the shards, from which it was loaded
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    close(their_logits(tmp_path), their_logits(folder))


WITHOUT_CLASS = ("granite", "ernie4_5", "vaultgemma")  # for sequence classification, in transformers
FEW = ("llama", "llama tied", "qwen3", "phi3", "gemma2", "gemma3_text", "gpt_neox", "gpt2", "opt")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in FEW else pytest.mark.slow)
        for case in FAMILIES
        if case not in WITHOUT_CLASS
    ],
)
def test_reward_models_both_ways(case, tmp_path):
    """AutoModelForSequenceClassification pools the last real token of what we wrote, even where it ends a sequence."""
    import transformers

    model = theirs(case, "scalar")
    model.save_pretrained(tmp_path / "theirs")
    mine = hf.load_model(tmp_path / "theirs", head="scalar")
    save_model(mine, tmp_path / "ours")
    written, wanted = (json.loads((tmp_path / name / "config.json").read_bytes()) for name in ("ours", "theirs"))
    assert written["architectures"] == wanted["architectures"]
    lengths_B = torch.tensor([15, 4, 9])
    padding_BT = torch.arange(15) >= lengths_B[:, None]
    tokens_BT = TOKENS_BT.clone()
    tokens_BT[torch.arange(3), lengths_B - 1] = 2
    with torch.no_grad():
        values_BT = mine.scalar(mine(tokens_BT.masked_fill(padding_BT, -1)))
        expected = values_BT[torch.arange(3), lengths_B - 1]
        for folder in ("theirs", "ours"):
            loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / folder).eval()
            pad = loaded.config.pad_token_id
            assert loaded.num_labels == 1
            close(loaded(tokens_BT.masked_fill(padding_BT, pad)).logits[:, 0], expected)


@pytest.mark.parametrize("pad", ["<pad>", "</s>", None])
def test_a_reward_folder_pads_with_what_no_sequence_ends_with(pad, tmp_path):
    """As its users do it: AutoTokenizer pads, AutoModelForSequenceClassification pools."""
    import transformers

    make_tokenizer(tmp_path / "source", pad=pad)
    theirs("llama", pad_token_id=2).save_pretrained(tmp_path / "source")
    mine = hf.load_model(tmp_path / "source", head="scalar")
    mine.score.weight.data.normal_()
    save_model(mine, tmp_path / "out", beside=hf.Texts(tmp_path / "source"))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.pad_token_id == model.config.pad_token_id != tokenizer.eos_token_id
    texts = ["w9 w10 w11 w12 </s>", "w9 </s>", "w20 w21"]
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    with torch.no_grad():
        got = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
        for text, score in zip(texts, got, strict=True):
            ids = torch.tensor([hf.load_tokenizer(tmp_path / "out").encode(text)])
            close(mine.scalar(mine(ids))[0, -1], score)


def test_precision_and_independence_of_the_file(broken):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        mine = hf.load_model(broken, head="lm", dtype=dtype)
        assert all(weight.dtype == dtype and weight.requires_grad for weight in mine.parameters())
    mine = hf.load_model(broken, head="lm")
    before = mine.embed_tokens.weight.clone()
    with open(broken / "model.safetensors", "r+b") as file:
        file.seek(5000)
        file.write(b"\0" * 20000)
    assert torch.equal(mine.embed_tokens.weight, before)
    half = hf.load_model(broken, head="lm", dtype=torch.bfloat16)
    save_model(half, broken)
    assert json.loads((broken / "config.json").read_text(encoding="utf-8"))["dtype"] == "bfloat16"
    assert load_file(broken / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16


def test_tied_weights_may_be_stored_twice(tmp_path):
    model = theirs("llama tied")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # old Llama folders hold these
    save_file(tensors, tmp_path / "model.safetensors")
    mine = hf.load_model(tmp_path, head="lm")
    close(our_logits(mine), model(TOKENS_BT).logits.detach())
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors.*lm_head\.weight differs.*tie_word_embeddings"):
        hf.load_model(tmp_path, head="lm")
    hf.load_model(tmp_path, head="scalar")


def test_folders_of_older_versions(tmp_path):
    """Pythia's: the masks of attention beside the weights, and the base model, without the prefix of its class."""
    model = theirs("gpt_neox")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    masks = {"bias": torch.ones(1, 1, 8, 8, dtype=torch.bool), "masked_bias": torch.tensor(-1e9)}
    masks = {f"gpt_neox.layers.1.attention.{name}": one for name, one in masks.items()}
    save_file(tensors | masks, file)
    close(our_logits(hf.load_model(tmp_path, head="lm")), model(TOKENS_BT).logits.detach())
    save_file(
        {name.removeprefix("gpt_neox."): one for name, one in tensors.items() if name != "embed_out.weight"}, file
    )
    critic = hf.load_model(tmp_path, head="scalar").state_dict()
    assert torch.equal(critic["embed_tokens.weight"], tensors["gpt_neox.embed_in.weight"])
    with pytest.raises(UserError, match="lacks tensor embed_out.weight"):
        hf.load_model(tmp_path, head="lm")


def edit_tensors(change):
    def edit(path):
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return edit


def edit_config(**changes):
    def edit(path):
        values = json.loads((path / "config.json").read_text(encoding="utf-8"))
        (path / "config.json").write_text(json.dumps(values | changes), encoding="utf-8")

    return edit


def truncate(path):
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def index(weight_map):
    def edit(path):
        (path / "model.safetensors").rename(path / "a.safetensors")
        names = load_file(path / "a.safetensors") if callable(weight_map) else ()
        content = weight_map(names) if callable(weight_map) else weight_map
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": content}), encoding="utf-8")

    return edit


NORM = "model.norm.weight"
BAD = {
    "no config": (lambda path: (path / "config.json").unlink(), r"config\.json does not exist"),
    "config not json": (lambda path: (path / "config.json").write_bytes(b"{"), r"config\.json cannot be read"),
    "family": (edit_config(model_type="bloom"), r"config\.json: model_type 'bloom'.*llama, mistral, qwen2, qwen3"),
    "eps": (edit_config(rms_norm_eps="tiny"), r"config\.json: 'rms_norm_eps' is 'tiny', but"),
    "eos of generation": (
        lambda path: (path / "generation_config.json").write_text('{"eos_token_id": 0.5}', encoding="utf-8"),
        r"generation_config\.json: eos_token_id is 0\.5",
    ),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), r"holds neither model\.safetensors nor"),
    "truncated": (truncate, r"model\.safetensors is truncated"),
    "missing": (edit_tensors(lambda t: t.pop(NORM)), rf"lacks tensor {NORM}; copy"),
    "extra": (edit_config(num_hidden_layers=1), r"holds tensor model\.layers\.1\..*not the model|copy all weights"),
    "shape": (edit_tensors(lambda t: t.update({NORM: torch.ones(5)})), rf"{NORM} has shape \[5\] of .*\[32\]"),
    "integers": (edit_tensors(lambda t: t.update({NORM: torch.ones(32).int()})), rf"{NORM} has shape \[32\] of I32"),
    "labels": (
        edit_tensors(lambda t: t.update({"score.weight": torch.ones(2, 32)})),
        r"holds tensor score\.weight; it is a critic or reward model",
    ),
    "shard above": (
        index({NORM: "../a.safetensors"}),
        rf"names '../a\.safetensors' as the file of tensor {NORM}, .*outside",
    ),
    "shard missing": (index({NORM: "b.safetensors"}), r"b\.safetensors is missing"),
    "shard lacks": (
        index(lambda names: dict.fromkeys(names, "a.safetensors") | {NORM: "config.json"}),
        r"config\.json is truncated or not a safetensors file",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folders_are_named(case, broken):
    damage, words = BAD[case]
    damage(broken)
    with pytest.raises(UserError, match=words) as raised:
        hf.load_model(broken, head="lm")
    assert str(broken) in str(raised.value)


def test_several_end_tokens(broken, tmp_path):
    (broken / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 3], "temperature": 0.7}), encoding="utf-8"
    )
    mine = hf.load_model(broken, head="lm")
    assert mine.config.eos_token_ids == (2, 3)
    save_model(mine, tmp_path / "a")
    save_model(mine, tmp_path / "b", beside=hf.Texts(broken))
    for name in ("a", "b"):
        assert hf.read_config(tmp_path / name).eos_token_ids == (2, 3)
    assert json.loads((tmp_path / "b" / "generation_config.json").read_text(encoding="utf-8"))["temperature"] == 0.7
