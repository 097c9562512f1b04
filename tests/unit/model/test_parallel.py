"""Shards of a model in one process."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_spmd.errors import UserError
from rlhf_spmd.model import hf
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.parallel import layers_of, slice_of
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.shard import Shard
from tests.folders import save_model
from tests.unit.model.test_attention import make_model, place

SHARDS = [
    Shard(stage, pp, i, tp) for pp, tp in ((1, 2), (1, 3), (2, 1), (3, 2)) for stage in range(pp) for i in range(tp)
]


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
