"""What only a GPU can show of the decode kernels: capture in a CUDA graph, caches beyond 2^31 numbers, exact rounding,
and packed prompts. Where there is no GPU, what can runs on the CPU."""

import pytest
import torch
import torch.nn.functional as F

from rlhf_spmd.kernels.decode_attention import Decode, decode_attention, decode_attention_ref, decode_attention_triton
from rlhf_spmd.kernels.kv_write import kv_write
from rlhf_spmd.kernels.rmsnorm import rmsnorm
from rlhf_spmd.kernels.rope import rope, rotate
from rlhf_spmd.kernels.silu_mul import silu_mul
from rlhf_spmd.model.attention import Packed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@on_gpu
@torch.inference_mode()
def test_a_captured_step_follows_lengths_and_tables():
    """The graph is captured with short rows; replays see new lengths and tables, and padding rows of length 0."""
    keys, values = torch.randn(2, 65, 2, 16, 64, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(4, 8, 64, device="cuda", dtype=torch.bfloat16)
    new = torch.randn(4, 2, 64, device="cuda", dtype=torch.bfloat16)
    tables = torch.zeros(4, 16, dtype=torch.int32, device="cuda")
    lengths = torch.ones(4, dtype=torch.int32, device="cuda")
    slots = torch.full((4,), -1, dtype=torch.int64, device="cuda")

    def step() -> torch.Tensor:
        kv_write(new, new, keys, values, slots)
        return decode_attention(q, keys, values, Decode.prepare(tables, lengths, 16, q.dtype))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed, case in enumerate(([250, 1, 0, 17], [16, 256, 100, 0])):
        torch.manual_seed(seed)
        lengths.copy_(torch.tensor(case))
        tables.copy_(torch.randperm(64)[:64].view(4, 16) + 1)
        last = (lengths - 1).clamp_min(0)
        block = tables.gather(1, (last // 16).long()[:, None])[:, 0]
        slots.copy_(torch.where(lengths > 0, block.long() * 16 + last % 16, -1))
        graph.replay()
        expected = decode_attention_ref(q, keys, values, tables, lengths)
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=0)
        assert torch.equal(keys[block[0].long(), :, int(last[0]) % 16], new[0])


@on_gpu
def test_a_cache_of_more_than_2_to_the_31_numbers():
    keys = values = torch.zeros(300_000, 8, 16, 64, device="cuda", dtype=torch.float16)
    assert keys.numel() > 2**31
    last = len(keys) - 1
    new = torch.randn(1, 8, 64, device="cuda", dtype=torch.float16)
    kv_write(new, new, keys, values, torch.tensor([last * 16], device="cuda"))
    assert torch.equal(keys[last, :, 0], new[0])
    tables, lengths = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([[last]], [1]))
    assert torch.equal(decode_attention_triton(new, keys, values, tables, lengths), new)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_as_torch(dtype):
    """Rotations exactly; norms and gates but for the last bit of the half precisions' float32 in between."""
    x = torch.randn(64, 16, 128, device=DEVICE).to(dtype)
    cos, sin = (torch.randn(64, 64, device=DEVICE).to(dtype) for _ in range(2))
    for got, part in zip(rope(x[:, :12], x[:, 12:], cos, sin), (x[:, :12], x[:, 12:]), strict=True):
        assert torch.equal(got, rotate(part, cos, sin))
    rows, weight = x.flatten(1), x.flatten(1)[0]
    y, s = rmsnorm(rows, weight, 1e-5, rows.flip(0))
    assert torch.equal(s, rows + rows.flip(0))
    expected = F.rms_norm(s, weight.shape, weight, 1e-5)
    assert (y == expected).float().mean() > (0.99 if dtype == torch.bfloat16 else 0.3)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    gated, expected = silu_mul(rows, rows.flip(0)), F.silu(rows) * rows.flip(0)
    torch.testing.assert_close(gated, expected, atol=1e-5, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5)


def test_packed_prompts_equal_padded_ones():
    lengths = [5, 130, 64]
    q, k, v = (torch.randn(sum(lengths), n, 64, device=DEVICE, dtype=torch.bfloat16) for n in (8, 2, 2))
    got = Packed(lengths, device=DEVICE).attend(0, q, k, v, None)
    at = 0
    for length in lengths:
        parts = (x[at : at + length].transpose(0, 1).float() for x in (q, k, v))
        q_HTd, k_KTd, v_KTd = parts
        expected = F.scaled_dot_product_attention(
            q_HTd, k_KTd.repeat_interleave(4, 0), v_KTd.repeat_interleave(4, 0), is_causal=True
        )
        torch.testing.assert_close(got[at : at + length].transpose(0, 1).float(), expected, atol=3e-2, rtol=0)
        at += length
