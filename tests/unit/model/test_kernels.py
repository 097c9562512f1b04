"""Passes of a GPU, whose kernels Triton's interpreter runs: numbers and gradients of torch's operations."""

import pytest
import torch

from rlhf_spmd.kernels import triton_import
from rlhf_spmd.model.attention import Packed
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.adapters import Adapters
from rlhf_spmd.runtime.generation.rollout import generate_rows

SHAPES = {
    "llama": {
        **{"model_type": "llama", "layers_without_rope": (1,), "activation": "gelu_pytorch_tanh"},
        **{"norm_offset": True, "scales_embeddings": True, "residual_scale": 0.7, "attention_scale": 0.4},
    },
    "mistral": {"model_type": "mistral", "sliding_window": 2, "sliding_layers": (0,), "local_rope_theta": 50.0},
    "qwen2": {"model_type": "qwen2", "attention_bias": True, "rotary_factor": 0.5, "rope_alternates": True},
    "gpt_neox": {
        **{"model_type": "gpt_neox", "parallel_residual": True, "layer_norm": True, "plain_mlp": True},
        **{"mlp_bias": True, "activation": "gelu"},
    },
    "qwen3": {"model_type": "qwen3", "qk_norm": True, "norms": "both"},
    "gemma2": {
        **{"model_type": "gemma2", "norms": "both", "norm_offset": True, "scales_embeddings": True},
        **{"activation": "gelu_pytorch_tanh", "attention_size": 9.0, "attention_cap": 1.5, "logits_cap": 0.8},
        **{"sliding_window": 2, "sliding_layers": (0,), "tie_embeddings": True},
    },
}
LENGTHS = (3, 1)


def model_of(family: str, **options) -> Transformer:
    sizes = {"vocab_size": 31, "hidden_size": 48, "intermediate_size": 80, "num_layers": 2, "num_heads": 4}
    config = ModelConfig(**sizes, num_kv_heads=2, head_dim=16, **SHAPES[family])
    model = Transformer(config, head="lm", seed=1, **options)
    generator = torch.Generator().manual_seed(2)
    for name, one in model.named_parameters():
        if one.dim() == 1 or name.endswith("lora_B"):
            one.data += 0.1 * torch.randn(one.shape, generator=generator)
        one.requires_grad_(name in model.trained_names())
    return model


def outcome(model: Transformer) -> list[torch.Tensor]:
    """Returns the logits of packed sequences and the gradients of what trains."""
    tokens_N = torch.arange(sum(LENGTHS)) * 7 % 31
    logits_NV = model.logits(model(tokens_N, context=Packed(LENGTHS)))
    trained = [one for one in model.parameters() if one.requires_grad]
    return [logits_NV.detach(), *torch.autograd.grad(logits_NV.float().sin().sum(), trained)]


FEW = (("qwen2", "plain"), ("qwen3", "recompute"), ("llama", "adapters"), ("gpt_neox", "plain"))  # the others are slow


@pytest.mark.parametrize(
    ("family", "how"),
    [
        pytest.param(family, how, marks=() if (family, how) in FEW else pytest.mark.slow)
        for family in SHAPES
        for how in ("plain", "recompute", "adapters")
    ],
)
def test_passes_by_kernels(family, how, monkeypatch):
    options = {"recompute": True} if how == "recompute" else {"adapters": Adapters(3, 6.0)} if how == "adapters" else {}
    model = model_of(family, **options)
    wanted = outcome(model)
    monkeypatch.setattr(triton_import, "DEVICES", ("cpu",))
    found = outcome(model)
    for got, x in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, x, rtol=1e-4, atol=2e-5)
    assert any(not torch.equal(got, x) for got, x in zip(found, wanted, strict=True))  # other sums: it ran
    with torch.no_grad():
        scored = model.logits(model(torch.arange(sum(LENGTHS)) * 7 % 31, context=Packed(LENGTHS)))
    torch.testing.assert_close(scored, found[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_generation_by_kernels(family, monkeypatch):
    """Decode steps join weights, and the norm of a layer adds what the layer before it leaves."""
    model = model_of(family).requires_grad_(False)
    prompts_BP, bits_BG = (
        torch.tensor([[3, 4]]),
        torch.randint(2**62, (1, 2), generator=torch.Generator().manual_seed(0)),
    )
    wanted = generate_rows(model, prompts_BP, bits_BG, eos_ids=())
    monkeypatch.setattr(triton_import, "DEVICES", ("cpu",))
    found = generate_rows(model, prompts_BP, bits_BG, eos_ids=())
    assert torch.equal(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=1e-5)
