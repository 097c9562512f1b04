"""The transformer on a GPU: its attention kernels against float64 on the CPU, and whole models against the CPU.

Where there is no GPU these tests run on the CPU, so that they are at least known to run.
"""

import pytest
import torch

from rlhf_spmd.model.attention import Packed, attend, has_packed_kernel
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.transformer import Transformer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (9, 3), (8, 1)])
@pytest.mark.parametrize("num_tokens", [1, 5, 37])
@pytest.mark.parametrize("window", [None, 7])
def test_attention(dtype, atol, heads, num_tokens, window):
    num_heads, num_kv_heads = heads
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, num_heads, num_tokens, 64, generator=generator).to(dtype)
    k, v = (torch.randn(3, num_kv_heads, num_tokens, 64, generator=generator).to(dtype) for _ in range(2))
    hidden_TT = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    if window is not None:
        hidden_TT |= torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril(-window)
    k_wide, v_wide = (x.double().repeat_interleave(num_heads // num_kv_heads, 1) for x in (k, v))
    scores = (q.double() @ k_wide.transpose(2, 3) / 8).masked_fill(hidden_TT, -torch.inf)
    got = attend(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), window)
    torch.testing.assert_close(got.cpu().double(), scores.softmax(3) @ v_wide, atol=atol, rtol=0)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_models_and_gradients_equal_the_cpus(family):
    config = ModelConfig(
        model_type=family,
        vocab_size=101,
        hidden_size=96,
        intermediate_size=130,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        attention_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        sliding_window=7 if family == "mistral" else None,
        sliding_layers=(0, 1, 2) if family == "mistral" else (),
    )
    tokens_BT = torch.randint(101, (3, 29), generator=torch.Generator().manual_seed(0))
    grads = {}
    for device, dtype in (("cpu", torch.float64), (DEVICE, torch.float32), (DEVICE, torch.bfloat16)):
        model = Transformer(config, head="lm", seed=1, dtype=dtype, device=device)
        logits_BTV = model.logits(model(tokens_BT.to(device))).double().cpu()
        logits_BTV.square().sum().backward()
        grads[device, dtype] = logits_BTV, {n: w.grad.double().cpu() for n, w in model.named_parameters()}
    exact_logits, exact_grads = grads["cpu", torch.float64]
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 0.1)):
        logits, got = grads[DEVICE, dtype]
        assert (logits - exact_logits).norm() < tolerance * exact_logits.norm()
        for name, grad in got.items():
            assert (grad - exact_grads[name]).norm() <= tolerance * exact_grads[name].norm() + 1e-9, name


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
def test_packed_sequences_equal_the_cpus(dtype, tolerance, window):
    """In bfloat16 by torch's kernel for sequences of unequal length, in float32 one by one."""
    config = ModelConfig(
        model_type="mistral",
        vocab_size=101,
        hidden_size=96,
        intermediate_size=130,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        sliding_window=window,
        sliding_layers=(0, 1, 2) if window else (),
    )
    lengths = (29, 1, 1, 13, 40)
    tokens_N = torch.randint(101, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    found = {}
    for name, device, precision in (("exact", "cpu", torch.float64), ("got", DEVICE, dtype)):
        model = Transformer(config, head="lm", seed=1, dtype=precision, device=device)
        logits_NV = model.logits(model(tokens_N.to(device), context=Packed(lengths, device=device)))
        logits_NV.double().square().sum().backward()
        found[name] = [logits_NV.double().cpu(), *(w.grad.double().cpu() for w in model.parameters())]
    if DEVICE == "cuda":
        query = torch.empty(1, 6, 32, dtype=dtype, device=DEVICE)
        assert has_packed_kernel(query) == (dtype == torch.bfloat16 and torch.cuda.get_device_capability() >= (8, 0))
    for exact, got in zip(found["exact"], found["got"], strict=True):
        assert (got - exact).norm() <= tolerance * exact.norm() + 1e-9
