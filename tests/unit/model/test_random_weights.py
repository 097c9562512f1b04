"""Random weights are functions of a number's place, so any shard has its part of one model."""

import pytest
import torch

from rlhf_spmd.config.model_folders import write_random_model
from rlhf_spmd.model.hf import load_model, load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("random") / "model"
    write_random_model(path, "llama-15m", "float32")
    return path


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
