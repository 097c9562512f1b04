"""What `python -m bench kernels` times: per kernel the call, its peers, the bytes that must move, and the promise."""

# B rows, V vocabulary, N tokens, D hidden, I intermediate, H heads, K key-value heads, d head dim, s slots of a block

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from rlhf_spmd.kernels.decode_attention import Decode, decode_attention
from rlhf_spmd.kernels.kv_write import kv_write
from rlhf_spmd.kernels.rmsnorm import rmsnorm
from rlhf_spmd.kernels.rope import rope, rotate
from rlhf_spmd.kernels.sample import sample
from rlhf_spmd.kernels.silu_mul import silu_mul
from rlhf_spmd.kernels.token_logprobs import token_logprobs
from rlhf_spmd.model.attention import Packed


@dataclass(frozen=True, slots=True)
class Case:
    """Peers that do the same work; the first is ours."""

    kernel: str
    shape: str
    dtype: torch.dtype
    calls: dict[str, Callable[[], Any]]
    num_bytes: float = 0.0  # that any implementation must move; 0: not bound by memory
    flops: float = 0.0
    least_share: float = 0.0  # promised share of the measured memory ceiling
    least_speedup: dict[str, float] = field(default_factory=dict)  # peer -> promised ratio of its time to ours
    forget: Callable[[], None] = lambda: None  # drops what a call leaves behind


def generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, generator=generator(device), device=device).to(dtype)


RULES = {"plain": {}, "top-k 50": {"top_k": 50}, "top-p 0.95": {"top_p": 0.95}, "min-p 0.05": {"min_p": 0.05}}


def sampling(device: torch.device, rows: int, vocab: int, dtype: torch.dtype, rule: str, **promise: Any) -> Case:
    """Draws a token per row. Random logits are flatter than those of a trained model: many tokens to tell apart."""
    logits_BV = random(rows, vocab, dtype=dtype, device=device) * 3.0
    bits_B = torch.empty(rows, dtype=torch.int64, device=device).random_(generator=generator(device))
    calls = {
        "ours": lambda: sample(logits_BV, bits_B, temperature=0.8, **RULES[rule]),
        "transformers": lambda: by_transformers(logits_BV, 0.8, **RULES[rule]),
    }
    if device.type == "cuda":
        calls |= by_flashinfer(logits_BV, 0.8, rule)
    num_bytes = logits_BV.numel() * logits_BV.element_size()
    return Case("sample", f"[{rows}, {vocab}] {rule}", dtype, calls, num_bytes, **promise)


def by_transformers(
    logits_BV: torch.Tensor, temperature: float, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
):
    """Applies transformers' logits warpers, then softmax and multinomial as `generate` does; with top-p that is a sort.
    It also gives the drawn token's logprob, which reinforcement learning needs and `sample` returns."""
    from transformers.generation import logits_process as warpers

    scores_BV = warpers.TemperatureLogitsWarper(temperature)(None, logits_BV.float())
    if top_k:
        scores_BV = warpers.TopKLogitsWarper(top_k)(None, scores_BV)
    if top_p < 1.0:
        scores_BV = warpers.TopPLogitsWarper(top_p)(None, scores_BV)
    if min_p:
        scores_BV = warpers.MinPLogitsWarper(min_p)(None, scores_BV)
    tokens_B1 = torch.multinomial(scores_BV.softmax(dim=-1), 1)
    return tokens_B1, scores_BV.gather(1, tokens_B1) - scores_BV.logsumexp(dim=-1, keepdim=True)


def by_flashinfer(logits_BV: torch.Tensor, temperature: float, rule: str) -> dict[str, Callable]:
    """Applies the sampling kernels of flashinfer-python where they are installed; they return no logprob."""
    if importlib.util.find_spec("flashinfer") is None:
        return {}
    from flashinfer import sampling as kernels

    def probabilities() -> torch.Tensor:
        return (logits_BV.float() / temperature).softmax(dim=-1)

    draw = {
        "plain": lambda: kernels.sampling_from_probs(probabilities()),
        "top-k 50": lambda: kernels.top_k_sampling_from_probs(probabilities(), 50),
        "top-p 0.95": lambda: kernels.top_p_sampling_from_probs(probabilities(), 0.95),
        "min-p 0.05": lambda: kernels.min_p_sampling_from_probs(probabilities(), 0.05),
    }
    return {"flashinfer": draw[rule]}


def projection(device: torch.device, num: int, vocab: int, hidden: int, dtype: torch.dtype, **promise: Any) -> Case:
    """Computes logprobs of known tokens, forward and backward: the output layer of training."""
    hidden_ND = random(num, hidden, dtype=dtype, device=device).requires_grad_()
    weight_VD = (random(vocab, hidden, dtype=dtype, device=device) / hidden**0.5).requires_grad_()
    tokens_N = torch.randint(vocab, (num,), generator=generator(device), device=device)

    def forget() -> None:
        hidden_ND.grad = weight_VD.grad = None

    def step(logprobs: Callable) -> None:
        forget()
        with torch.enable_grad():
            logprobs(hidden_ND, weight_VD, tokens_N).sum().backward()

    calls = {"ours": lambda: step(token_logprobs), "full logits": lambda: step(by_full_logits)}
    shape = f"[{num}, {vocab}] hidden {hidden}"
    return Case("token_logprobs", shape, dtype, calls, flops=6.0 * num * vocab * hidden, forget=forget, **promise)


def by_full_logits(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, tokens_N: torch.Tensor) -> torch.Tensor:
    return F.linear(hidden_ND, weight_VD).float().log_softmax(dim=-1).gather(1, tokens_N[:, None])[:, 0]


def attending(
    device: torch.device,
    rows: int,
    context: int,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    block_size: int,
    spread: bool = False,
    **promise: Any,
) -> Case:
    """Computes a decode step of one layer.

    heads: H, K, d.
    spread: lengths from an eighth of the context to all of it.
    """
    (num_heads, kv_heads, head_dim), per_row = heads, -(-context // block_size)
    q_BHd = random(rows, num_heads, head_dim, dtype=dtype, device=device)
    paged = [random(rows * per_row, kv_heads, block_size, head_dim, dtype=dtype, device=device) for _ in range(2)]
    lengths_B = torch.full((rows,), context, dtype=torch.int32, device=device)
    if spread:
        lengths_B = torch.linspace(context / 8, context, rows, device=device).int()
    order = torch.arange(rows * per_row, device=device)
    if per_row > 1:
        order = torch.randperm(rows * per_row, generator=generator(device), device=device)
    step = Decode.prepare(order.view(rows, per_row).int(), lengths_B, block_size, dtype)
    row_k, row_v = (random(rows, kv_heads, context, head_dim, dtype=dtype, device=device) for _ in range(2))
    real_B11S = (torch.arange(context, device=device) < lengths_B[:, None])[:, None, None] if spread else None

    def padded() -> torch.Tensor:
        return F.scaled_dot_product_attention(q_BHd[:, :, None], row_k, row_v, attn_mask=real_B11S, enable_gqa=True)

    calls = {"ours": lambda: decode_attention(q_BHd, *paged, step), "padded sdpa": padded}
    num_bytes = 2.0 * int(lengths_B.sum()) * kv_heads * head_dim * q_BHd.element_size()
    shape = f"{rows} rows, {'up to ' if spread else ''}{context} tokens, {num_heads}/{kv_heads} heads of {head_dim}"
    return Case("decode_attention", f"{shape}, blocks of {block_size}", dtype, calls, num_bytes, **promise)


def normalising(device: torch.device, num: int, size: int, dtype: torch.dtype) -> Case:
    x, residual, weight = (random(*shape, dtype=dtype, device=device) for shape in ((num, size), (num, size), (size,)))

    def by_torch() -> tuple:
        total = x + residual
        return F.rms_norm(total, (size,), weight, 1e-5), total

    calls = {"ours": lambda: rmsnorm(x, weight, 1e-5, residual), "torch": by_torch}
    return Case("rmsnorm", f"[{num}, {size}]", dtype, calls, 4.0 * x.numel() * x.element_size())


def turning(device: torch.device, num: int, heads: tuple[int, int, int], dtype: torch.dtype) -> Case:
    num_heads, kv_heads, head_dim = heads
    fused = random(num, num_heads + kv_heads, head_dim, dtype=dtype, device=device)
    q, k = fused[:, :num_heads], fused[:, num_heads:]
    cos, sin = (random(num, head_dim // 2, dtype=dtype, device=device) for _ in range(2))
    calls = {"ours": lambda: rope(q, k, cos, sin), "torch": lambda: (rotate(q, cos, sin), rotate(k, cos, sin))}
    return Case("rope", f"[{num}, {num_heads} + {kv_heads}, {head_dim}]", dtype, calls, 2.0 * fused.nbytes)


def gating(device: torch.device, num: int, inner: int, dtype: torch.dtype) -> Case:
    gate, up = random(num, 2 * inner, dtype=dtype, device=device).chunk(2, dim=1)
    calls = {"ours": lambda: silu_mul(gate, up), "torch": lambda: F.silu(gate) * up}
    return Case("silu_mul", f"[{num}, {inner}]", dtype, calls, 3.0 * gate.numel() * gate.element_size())


def writing(device: torch.device, num: int, heads: tuple[int, int, int], dtype: torch.dtype) -> Case:
    _, kv_heads, head_dim = heads
    k, v = (random(num, kv_heads, head_dim, dtype=dtype, device=device) for _ in range(2))
    cache = [torch.zeros(2 * num // 16 + 1, kv_heads, 16, head_dim, dtype=dtype, device=device) for _ in range(2)]
    slots = torch.randperm(2 * num, generator=generator(device), device=device)[:num]

    def by_torch() -> None:
        for new, stored in zip((k, v), cache, strict=True):
            stored[slots // 16, :, slots % 16] = new

    calls = {"ours": lambda: kv_write(k, v, *cache, slots), "torch": by_torch}
    return Case("kv_write", f"[{num}, {kv_heads}, {head_dim}]", dtype, calls, 2.0 * (k.nbytes + v.nbytes))


def prefilling(device: torch.device, lengths: list[int], heads: tuple[int, int, int], dtype: torch.dtype) -> Case:
    """Computes attention of prompts of unequal length: laid end to end (torch's own kernel) or padded to the
    longest."""
    num_heads, kv_heads, head_dim = heads
    packed = Packed(lengths, device=device)
    q, k, v = (random(sum(lengths), n, head_dim, dtype=dtype, device=device) for n in (num_heads, kv_heads, kv_heads))
    q_BHTd, k_BKTd, v_BKTd = (
        random(len(lengths), n, max(lengths), head_dim, dtype=dtype, device=device)
        for n in (num_heads, kv_heads, kv_heads)
    )

    def padded() -> torch.Tensor:
        return F.scaled_dot_product_attention(q_BHTd, k_BKTd, v_BKTd, is_causal=True, enable_gqa=True)

    calls = {"ours": lambda: packed.attend(0, q, k, v, None), "padded sdpa": padded}
    flops = sum(2.0 * num_heads * head_dim * length**2 for length in lengths)  # half of the square is masked
    shape = f"{len(lengths)} prompts, {sum(lengths)} tokens, longest {max(lengths)}"
    return Case("packed attention", shape, dtype, calls, flops=flops)
