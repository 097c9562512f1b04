"""The transformer on a GPU: its attention kernels against float64 on the CPU, and whole models against the CPU."""

import pytest
import torch

from rlhf_spmd.model.attention import Packed, attend, causal_mask, has_packed_kernel
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.transformer import Transformer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (9, 3), (8, 1)])
@pytest.mark.parametrize("lengths", [(37, 37), (1, 37), (5, 37)])
@pytest.mark.parametrize("masked", [False, True])
def test_attention(dtype, atol, heads, lengths, masked):
    (num_heads, num_kv_heads), (num_new, num_keys) = heads, lengths
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, num_heads, num_new, 64, generator=generator).to(dtype)
    k, v = (torch.randn(3, num_kv_heads, num_keys, 64, generator=generator).to(dtype) for _ in range(2))
    mask = causal_mask(num_new, num_keys, q.device).repeat(3, 1, 1, 1)
    mask[1, ..., 3:9] &= not masked
    mask[..., 0] = True
    exact = attend(q.double(), k.double(), v.double(), mask)
    got = attend(q.cuda(), k.cuda(), v.cuda(), mask.cuda() if masked else None)
    torch.testing.assert_close(got.cpu().double(), exact, atol=atol, rtol=0)


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
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32), ("cuda", torch.bfloat16)):
        model = Transformer(config, head="lm", seed=1, dtype=dtype, device=device)
        logits_BTV = model.logits(model(tokens_BT.to(device))).double().cpu()
        logits_BTV.square().sum().backward()
        grads[device, dtype] = logits_BTV, {n: w.grad.double().cpu() for n, w in model.named_parameters()}
    exact_logits, exact_grads = grads["cpu", torch.float64]
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 0.1)):
        logits, got = grads["cuda", dtype]
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
    for device, precision in (("cpu", torch.float64), ("cuda", dtype)):
        model = Transformer(config, head="lm", seed=1, dtype=precision, device=device)
        logits_NV = model.logits(model(tokens_N.to(device), context=Packed(lengths, device=device)))
        logits_NV.double().square().sum().backward()
        found[device] = [logits_NV.double().cpu(), *(w.grad.double().cpu() for w in model.parameters())]
    query = torch.empty(1, 6, 32, dtype=dtype, device="cuda")
    assert has_packed_kernel(query) == (dtype == torch.bfloat16 and torch.cuda.get_device_capability() >= (8, 0))
    for exact, got in zip(found["cpu"], found["cuda"], strict=True):
        assert (got - exact).norm() <= tolerance * exact.norm() + 1e-9
