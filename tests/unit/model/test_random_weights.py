"""Random weights are functions of a number's place, so any shard has its part of one model."""

from types import SimpleNamespace

import pytest
import torch

from rlhf_spmd.config.model_folders import write_random_model
from rlhf_spmd.model.hf import load_model, load_tokenizer
from rlhf_spmd.model.parallel import Parallel, slice_of
from rlhf_spmd.plan.shard import Shard


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("random") / "model"
    write_random_model(path, "llama-15m", "float32")
    return path


@pytest.mark.parametrize("shard", [Shard(tp=2, tp_index=1), Shard(1, 3), Shard(1, 2, 0, 2)], ids=str)
def test_a_shard_is_a_part_of_the_whole(folder, shard):
    whole = load_model(folder, head="lm")
    group = SimpleNamespace(size=lambda: shard.tp) if shard.tp > 1 else None
    part = load_model(folder, head="lm", parallel=Parallel(shard, group))
    state, config = whole.state_dict(), whole.config
    assert 0 < len(part.state_dict()) <= len(state)
    for name, weight in part.state_dict().items():
        assert torch.equal(weight, state[name][slice_of(name, config, shard)]), name


def test_matrices_look_like_those_of_a_new_model(folder):
    model = load_model(folder, head="scalar", fresh_head=False)
    attention = model.layers["0"].self_attn
    q, k = attention.q_proj.weight.detach(), attention.k_proj.weight.detach()
    assert (
        abs(q.mean()) < 1e-3
        and q.std() == pytest.approx(0.02, rel=0.02)
        and model.layers["0"].input_layernorm.weight.eq(1).all()
    )
    assert abs(torch.corrcoef(torch.stack([q.flatten(), k.flatten()]))[0, 1]) < 0.02
    assert torch.linalg.svdvals(q)[0] < 1.2 * 2 * 0.02 * q.shape[0] ** 0.5  # of independent numbers (Marchenko-Pastur)
    assert model.score.weight.std() > 0.01  # so that a reward is not the same for all
    assert load_tokenizer(folder).known(32000).stop == 1024
