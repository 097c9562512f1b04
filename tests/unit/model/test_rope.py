"""Rotary positions: the angles of a model's config."""

import pytest
import torch

from rlhf_spmd.model import rope
from rlhf_spmd.model.attention import Packed
from rlhf_spmd.model.config import from_hf
from tests.unit.model.test_transformer import LLAMA3, SMALL, YARN, ours, some_tokens, theirs

TRAINED = 16
KINDS = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "llama3": LLAMA3,
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": TRAINED},
}


@pytest.mark.parametrize("length", [TRAINED, TRAINED + 1, 60])
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_angles_before_and_beyond_the_trained_length(kind, share, length):
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {**KINDS[kind], "rope_theta": 5e4, "partial_rotary_factor": share}
    if kind == "longrope":
        pairs = int(20 * share) // 2
        parameters |= {"short_factor": [1.0 + 0.1 * i for i in range(pairs)]}
        parameters |= {"long_factor": [2.0 + 0.7 * i for i in range(pairs)]}
    sizes = SMALL | {"head_dim": 20, "max_position_embeddings": TRAINED if kind == "dynamic" else 64}
    config = transformers.LlamaConfig(**sizes, rope_parameters=dict(parameters))
    frequencies_f, factor = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)
    family = {"model_type": "phi3", "original_max_position_embeddings": TRAINED}
    found_f, found = rope.frequencies(from_hf(sizes | family | {"rope_parameters": parameters}), length=length)
    assert found == pytest.approx(factor)
    angles_Tf = torch.arange(length)[:, None] * frequencies_f
    cos_Tf, sin_Tf = rope.cos_sin(torch.arange(length), found_f, found, torch.float32)
    torch.testing.assert_close(cos_Tf, angles_Tf.cos() * factor, atol=1e-5, rtol=0)
    torch.testing.assert_close(sin_Tf, angles_Tf.sin() * factor, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", ["longrope beyond", "dynamic beyond"])
def test_the_longest_row_of_a_run_chooses_the_factors_of_all(case):
    model = theirs(case)
    mine, tokens_BT = ours(model), some_tokens(2, TRAINED + 5, 61)
    with torch.no_grad():
        expected = model(tokens_BT).logits[:, :7], model(tokens_BT[:, :7]).logits
        for longest, logits_BTV in zip((TRAINED + 5, TRAINED), expected, strict=True):
            mine.ropes.longest = longest
            torch.testing.assert_close(mine.logits(mine(tokens_BT[:, :7])), logits_BTV, atol=1e-5, rtol=1e-5)
            packed_ND = mine(tokens_BT[:, :7].flatten(), context=Packed([7, 7]))
            torch.testing.assert_close(mine.logits(packed_ND).view_as(logits_BTV), logits_BTV, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(*expected, atol=1e-3)
