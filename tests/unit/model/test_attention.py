"""Packed sequences against one row at a time, recomputation, and shards of a model in one process."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_spmd.errors import UserError
from rlhf_spmd.model import hf
from rlhf_spmd.model.attention import Packed
from rlhf_spmd.model.config import ModelConfig, from_hf
from rlhf_spmd.model.parallel import Parallel, is_split, layers_of, slice_of, vocabulary_of
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.shard import Shard, split
from tests.folders import save_model

SMALL = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 13,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
CASES = {
    "llama": ("llama", {}),
    "mha, biases": ("llama", {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True}),
    "one key": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "window": ("mistral", {"sliding_window": 5}),
    "window 1": ("mistral", {"sliding_window": 1}),
    "some windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qk norm": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4}}),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "yarn": ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
    "llama3": ("llama", {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}}),
}
LENGTHS = [(7,), (1,), (1, 1, 1), (5, 5, 5), (9, 1, 23, 2), (3, 3, 17, 17, 1, 1, 12), (1, 40)]


def make_model(case: str, *, head: str = "lm", dtype=torch.float64, **options) -> Transformer:
    """Every parameter away from its initial value."""
    family, values = CASES[case]
    model = Transformer(from_hf({"model_type": family, **SMALL, **values}), head=head, dtype=dtype, **options)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.data = (float(weight.dim() == 1) + 0.3 * torch.randn(weight.shape, generator=generator)).to(dtype)
    return model


def some_tokens(lengths, seed: int = 0) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.integers(0, SMALL["vocab_size"], length)) for length in lengths]


def gradients(model: Transformer) -> dict[str, Tensor]:
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_packed_rows_equal_single_rows(case, lengths):
    """Outputs and gradients; with any padding at the end."""
    model, rows = make_model(case), some_tokens(lengths)
    weight_ND = torch.randn(sum(lengths), 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    alone_ND = torch.cat([model(row[None])[0] for row in rows])
    (alone_ND * weight_ND).sum().backward()
    expected = gradients(model)
    for more in (0, 1, 4):
        context = Packed(lengths, num_tokens=sum(lengths) + more)
        assert context.num_tokens == sum(lengths) + more
        packed_ND = model(torch.cat(rows), context=context)
        assert packed_ND.shape == (context.num_tokens, 24)
        torch.testing.assert_close(packed_ND[: sum(lengths)], alone_ND, atol=1e-12, rtol=1e-12)
        (packed_ND[: sum(lengths)] * weight_ND).sum().backward()
        found_all = gradients(model)
        assert set(found_all) == set(expected)
        for name, found in found_all.items():
            torch.testing.assert_close(found, expected[name], atol=1e-11, rtol=1e-11, msg=name)


@pytest.mark.parametrize("case", ["window", "qk norm", "llama3"])
def test_packing_does_not_mix_neighbours(case):
    """Other tokens in one sequence leave the bits of the others alone."""
    model, rows = make_model(case, dtype=torch.float32), some_tokens((6, 9, 6))
    other = [rows[0], 36 - rows[1], rows[2]]
    found, changed = (model(torch.cat(x), context=Packed((6, 9, 6))).split((6, 9, 6)) for x in (rows, other))
    assert torch.equal(found[0], changed[0]) and torch.equal(found[2], changed[2])
    assert not torch.equal(found[1], changed[1])


def test_positions_restart():
    context = Packed((3, 1, 2), num_tokens=8)
    assert context.positions.tolist() == [0, 1, 2, 0, 0, 1, 0, 1] and context.lengths == [3, 1, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["mha, biases", "some windows", "qk norm"])
def test_recomputation_gives_the_same_bits(case, dtype):
    model, rows = make_model(case, dtype=dtype), some_tokens((9, 1, 4))
    found = []
    for recompute in (False, True):
        model.recompute = recompute
        logits_NV = model.logits(model(torch.cat(rows), context=Packed((9, 1, 4))))
        (logits_NV.float().log_softmax(1)[:, 5]).sum().backward()
        found.append((logits_NV.detach(), gradients(model)))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


def test_recomputation_keeps_less():
    """Of 3 layers only the inputs, which is a small part of what the backward pass needs."""
    model, tokens_N = make_model("llama", dtype=torch.float32), torch.cat(some_tokens((40,)))
    kept = {}
    for recompute in (False, True):
        model.recompute, sizes = recompute, {}

        def note(x: Tensor, sizes=sizes) -> Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            model(tokens_N, context=Packed((40,)))
        kept[recompute] = sum(sizes.values())
    assert kept[True] < 0.3 * kept[False]


# ---- shards ----------------------------------------------------------------------------------------------------------

SHARDS = [
    Shard(stage, pp, i, tp) for pp, tp in ((1, 2), (1, 3), (2, 1), (3, 2)) for stage in range(pp) for i in range(tp)
]


def place(shard: Shard) -> Parallel:
    """A shard without its messages."""
    return Parallel(shard, group=SimpleNamespace(size=lambda: shard.tp) if shard.tp > 1 else None)


def names_of(config: ModelConfig, head: str, shard: Shard) -> set[str]:
    names = {name for name in Transformer(config, head=head, device="meta").state_dict() if name.startswith("layers.")}
    names = {name for name in names if int(name.split(".")[1]) in layers_of(config, shard)}
    if shard.stage == 0:
        names.add("embed_tokens.weight")
    if shard.stage == shard.pp - 1:
        names |= {"norm.weight", "score.weight"} if head == "scalar" else {"norm.weight"}
        if head == "lm":
            names.add("embed_tokens.weight" if config.tie_embeddings else "lm_head.weight")
    return names


@pytest.mark.parametrize("shard", SHARDS, ids=str)
@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("case", ["mha, biases", "qk norm", "llama"])
def test_a_shard_is_a_slice_of_the_whole(case, head, shard, tmp_path):
    """The same names; drawn from a seed or read from a folder, the same numbers."""
    whole = make_model(case, head=head)
    state = {name: weight.clone() for name, weight in whole.state_dict().items()}
    save_model(whole, tmp_path)
    read = hf.load_model(tmp_path, head=head, dtype=torch.float64, parallel=place(shard))
    drawn = Transformer(whole.config, head=head, dtype=torch.float64, seed=3, parallel=place(shard)).state_dict()
    whole.init_weights(3)
    assert set(read.state_dict()) == set(drawn) == names_of(whole.config, head, shard)
    for name, weight in read.state_dict().items():
        part = slice_of(name, whole.config, shard)
        assert weight.is_contiguous() and torch.equal(weight, state[name][part]), name
        assert torch.equal(drawn[name], whole.state_dict()[name][part]), name


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("case", ["mha, biases", "qk norm"])
def test_the_slices_make_the_whole(case, tp):
    """Side by side along one dim the slices are the weight; without such a dim every slice is all of it."""
    model = make_model(case)
    for name, weight in model.named_parameters():
        parts = [weight[slice_of(name, model.config, Shard(tp=tp, tp_index=i))] for i in range(tp)]
        if is_split(name):
            assert any(sum(p.shape[d] for p in parts) == weight.shape[d] for d in range(weight.dim()))
            dim = next(d for d in range(weight.dim()) if parts[0].shape[d] < weight.shape[d])
            assert torch.equal(torch.cat(parts, dim), weight)
        else:
            assert all(part.shape == weight.shape for part in parts)
    vocabularies = [vocabulary_of(model.config, Shard(tp=tp, tp_index=i)) for i in range(tp)]
    assert list(itertools.chain(*vocabularies)) == list(range(37))
    assert [len(split(37, tp, i)) for i in range(tp)] == [len(part) for part in vocabularies]


def test_a_fresh_critic_of_a_shard(tmp_path):
    save_model(make_model("llama"), tmp_path)
    last = hf.load_model(tmp_path, head="scalar", parallel=place(Shard(1, 2, 0, 2)))
    assert last.score.weight.shape == (1, 24) and not last.score.weight.any()
    with pytest.raises(UserError, match="not a reward model"):  # on every shard, not only on the one with the head
        hf.load_model(tmp_path, head="scalar", fresh_head=False, parallel=place(Shard(0, 2, 0, 2)))


def test_every_shard_checks_the_whole_model(tmp_path):
    """A wrong tensor of another stage or slice is found too."""
    model = make_model("qk norm")
    save_model(model, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.norm.weight": torch.ones(5)}, file)
    with pytest.raises(UserError, match=r"model\.norm\.weight has shape \[5\]"):
        hf.load_model(tmp_path, head="lm", parallel=place(Shard(0, 3, 1, 2)))
    copy = tensors["model.embed_tokens.weight"].clone()
    copy[30] += 1  # in the second slice
    save_file(tensors | {"lm_head.weight": copy}, file)
    with pytest.raises(UserError, match="differs from"):
        hf.load_model(tmp_path, head="lm", parallel=place(Shard(2, 3, 1, 2)))
    hf.load_model(tmp_path, head="lm", dtype=torch.float64, parallel=place(Shard(1, 3, 1, 2)))


def test_output_shape_of_a_stage():
    model = Transformer(make_model("llama").config, head="lm", device="meta", parallel=place(Shard(0, 2, 1, 3)))
    assert [model.output_shape(num) for num in (1, 3, 7)] == [(1, 24), (1, 24), (3, 24)]
    assert list(model.layers) == ["0"] and model.dtype == torch.float32
