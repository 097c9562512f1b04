"""Samples a token from logits with given random bits: inverse CDF down a tree of fixed blocks of the vocabulary.

    z_v = logits_v / temperature,   p_v = exp(z_v - max z) / sum over the support,   token = sample of the tree

support.py defines the support, cdf_tree.py the sampling. The blocks are fixed, so a rank that owns a shard of the
vocabulary computes the same block masses, the token does not depend on tensor parallelism (sample_shard.py), and only
one block per row is read in detail.

On a GPU, unrestricted rows are bound by one read of the logits: B x V x (bytes of one) / bandwidth. A first kernel,
with many programs per row, writes the maximum and mass of each block; a second, with one program per row, merges them,
picks a block and reads it again. If any row is restricted, support_threshold.py runs in between. Nothing waits for the
device, so all of it can be captured in a CUDA graph.

Legend: B sequences, V vocabulary, N vocabulary blocks, K tokens of a block or stored tokens, L levels.
"""

import torch
from torch import Tensor

from rlhf_spmd.kernels.cdf_tree import (
    BLOCK,
    LEVELS_INSIDE,
    descend_ref,
    descend_row,
    level_uniforms,
    levels_over,
)
from rlhf_spmd.kernels.sample_cpu import sample_cpu
from rlhf_spmd.kernels.support import Rules, Sampled, make_rules, support_ref
from rlhf_spmd.kernels.support_ids import collect_triton
from rlhf_spmd.kernels.support_threshold import Support, image, threshold_triton
from rlhf_spmd.kernels.triton_import import tl, triton

BLOCKS = 8  # blocks per program of the first kernel


@torch.no_grad()
def sample_ref(
    logits_BV: Tensor, bits_B, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, num_stored: int = 0
) -> Sampled:
    """Computes the reference of sample(): sorts whole rows; excluded tokens have mass 0 in a tree over the whole
    vocabulary."""
    rules = make_rules(logits_BV, temperature, top_k, top_p, min_p, num_stored)
    vocab_size = logits_BV.shape[1]
    z_BV = logits_BV.to(rules.temperature_B.dtype) / rules.temperature_B[:, None]
    keep_BV = support_ref(z_BV, rules)
    shifted_BV = z_BV.double() - z_BV.amax(dim=1, keepdim=True).double()
    masses_BV = torch.where(keep_BV, shifted_BV.exp(), 0.0)
    bits_B = torch.as_tensor(bits_B, device=logits_BV.device)
    tokens_B = descend_ref(masses_BV, level_uniforms(bits_B, levels_over(vocab_size) + LEVELS_INSIDE))
    tokens_B = tokens_B.clamp(max=vocab_size - 1)  # a row of NaN may end in the padding
    token_B, total_B, mass_B = shifted_BV.gather(1, tokens_B[:, None])[:, 0], shifted_BV.exp().sum(1), masses_BV.sum(1)
    numbers = torch.stack((token_B - mass_B.log(), token_B - total_B.log(), mass_B / total_B))
    numbers = torch.where(total_B > 0, numbers, torch.nan).to(z_BV.dtype)
    support_BK = None
    if num_stored:
        order_BV = torch.where(keep_BV, z_BV, -torch.inf).sort(dim=1, descending=True, stable=True).indices
        ids_BV = order_BV.masked_fill(~keep_BV.gather(1, order_BV), -1)
        support_BK = torch.nn.functional.pad(ids_BV, (0, num_stored), value=-1)[:, :num_stored].int()
    return Sampled(tokens_B, *numbers.unbind(), support_BK)


@triton.jit
def _blocks_kernel(
    # pointers
    logits_ptr,  # [B, V]
    temperature_ptr,  # [B]
    max_ptr,  # [B, N]
    mass_ptr,  # [B, N]
    # sizes
    vocab_size,
    num_blocks,
    # strides
    stride_lb,
    # meta
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Computes the largest logit of each block, and the sum of exp((logit - largest) / temperature)."""
    row = tl.program_id(0).to(tl.int64)
    block_N = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    ids_NK = block_N[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x_NK = tl.load(logits_ptr + row * stride_lb + ids_NK, mask=ids_NK < vocab_size, other=float("-inf")).to(tl.float32)
    max_N = tl.max(x_NK, axis=1)
    scale = 1.4426950408889634 / tl.load(temperature_ptr + row)  # log2 e
    shift_N = tl.where(max_N == float("-inf"), 0.0, max_N)  # a block of banned tokens has mass 0
    mass_N = tl.sum(tl.exp2((x_NK - shift_N[:, None]) * scale), axis=1)
    tl.store(max_ptr + row * num_blocks + block_N, max_N, mask=block_N < num_blocks)
    tl.store(mass_ptr + row * num_blocks + block_N, mass_N, mask=block_N < num_blocks)


@triton.jit
def _merge_kernel(
    # pointers
    temperature_ptr,  # [B]
    max_ptr,  # [B, N]
    mass_ptr,  # [B, N]
    total_ptr,  # [B]
    # sizes
    num_blocks,
    # meta
    LEAVES: tl.constexpr,
):
    """Computes the mass of a row, for the rules."""
    row = tl.program_id(0).to(tl.int64)
    mass_N, _highest = _relative_masses(temperature_ptr, max_ptr, mass_ptr, row, num_blocks, LEAVES)
    tl.store(total_ptr + row, tl.sum(mass_N, axis=0))


@triton.jit
def _relative_masses(temperature_ptr, max_ptr, mass_ptr, row, num_blocks, LEAVES: tl.constexpr):
    """Returns block masses relative to the row's largest logit, float64, and that logit."""
    leaf_N = tl.arange(0, LEAVES)
    there_N = leaf_N < num_blocks
    max_N = tl.load(max_ptr + row * num_blocks + leaf_N, mask=there_N, other=float("-inf"))
    mass_N = tl.load(mass_ptr + row * num_blocks + leaf_N, mask=there_N, other=0.0)
    highest = tl.max(max_N, axis=0)
    scale = 1.4426950408889634 / tl.load(temperature_ptr + row)
    weight_N = tl.where(max_N == float("-inf"), 0.0, tl.exp2((max_N - highest) * scale))
    return mass_N.to(tl.float64) * weight_N.to(tl.float64), highest


@triton.jit(do_not_specialize=["num_rows"])
def _draw_kernel(
    # pointers
    logits_ptr,  # [B, V]
    bits_ptr,  # [B]
    temperature_ptr,  # [B]
    floor_ptr,  # [B]
    max_ptr,  # [B, N]
    mass_ptr,  # [B, N]
    restricted_ptr,  # [B]
    least_ptr,  # [B]
    last_ptr,  # [B]
    support_mass_ptr,  # [B, N]
    tokens_ptr,  # [B]
    numbers_ptr,  # [3, B]: logprob, full logprob, support mass
    # sizes
    num_rows,
    vocab_size,
    num_blocks,
    # strides
    stride_lb,
    # meta
    RESTRICTED: tl.constexpr,  # whether any row may be restricted
    LEAVES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVER: tl.constexpr,  # levels over the blocks
    INSIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature, bits = tl.load(temperature_ptr + row), tl.load(bits_ptr + row)
    scale = 1.4426950408889634 / temperature
    mass_N, highest = _relative_masses(temperature_ptr, max_ptr, mass_ptr, row, num_blocks, LEAVES)
    highest_z = tl.div_rn(highest, temperature)
    total = tl.sum(mass_N, axis=0)
    if RESTRICTED:
        restricted = tl.load(restricted_ptr + row) != 0
        leaf_N = tl.arange(0, LEAVES)
        support_mass_N = tl.load(support_mass_ptr + row * num_blocks + leaf_N, mask=leaf_N < num_blocks, other=0.0)
        mass_N = tl.where(restricted, support_mass_N.to(tl.float64), mass_N)
    block = descend_row(mass_N, bits, 0, OVER)

    row_ptr = logits_ptr + row * stride_lb
    ids_K = block * BLOCK + tl.arange(0, BLOCK)
    x_K = tl.load(row_ptr + ids_K, mask=ids_K < vocab_size, other=float("-inf")).to(tl.float32)
    inside_K = tl.exp2((x_K - highest) * scale)
    if RESTRICTED:
        z_K = tl.div_rn(x_K, temperature)
        least, last = tl.load(least_ptr + row), tl.load(last_ptr + row)
        support_K = (image(z_K) > least) | ((image(z_K) == least) & (ids_K <= last))
        support_K = support_K & (z_K - highest_z >= tl.load(floor_ptr + row))
        inside_K = tl.where(support_K, inside_K, 0.0)
    token = block * BLOCK + descend_row(inside_K.to(tl.float64), bits, OVER, INSIDE)
    token = tl.minimum(token, vocab_size - 1)  # a row of NaN may end in the padding
    shifted = tl.div_rn(tl.load(row_ptr + token).to(tl.float32), temperature) - highest_z
    support_mass = tl.sum(mass_N, axis=0)
    sound = (total > 0.0) & (total < float("inf"))
    logprob = tl.where(sound, shifted.to(tl.float64) - tl.log(support_mass), float("nan"))
    full_logprob = tl.where(sound, shifted.to(tl.float64) - tl.log(total), float("nan"))
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(numbers_ptr + row, logprob.to(tl.float32))
    tl.store(numbers_ptr + num_rows + row, full_logprob.to(tl.float32))
    tl.store(numbers_ptr + 2 * num_rows + row, tl.where(sound, support_mass / total, float("nan")).to(tl.float32))


def sample_triton(
    logits_BV: Tensor, bits_B: Tensor, rules: Rules, num_stored: int, any_restricted: bool = True
) -> Sampled:
    """Launches the kernels. Rows may have any stride; logits of a row are contiguous.

    any_restricted: whether any row may be restricted.
    """
    num_rows, vocab_size = logits_BV.shape
    assert logits_BV.dtype in (torch.float32, torch.bfloat16, torch.float16), logits_BV.dtype
    assert logits_BV.stride(1) == 1 and bits_B.shape == (num_rows,) and bits_B.is_contiguous()
    assert bits_B.dtype == torch.int64, bits_B.dtype
    num_blocks, over = -(-vocab_size // BLOCK), levels_over(vocab_size)
    meta = {"LEAVES": max(8**over, 8)}
    max_BN = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits_BV.device)
    mass_BN = torch.empty_like(max_BN)
    tokens_B = torch.empty(num_rows, dtype=torch.int64, device=logits_BV.device)
    numbers_3B = max_BN.new_empty(3, num_rows)
    support_BK = torch.empty(num_rows, num_stored, dtype=torch.int32, device=logits_BV.device) if num_stored else None
    if num_rows == 0:
        return Sampled(tokens_B, *numbers_3B.unbind(), support_BK)
    _blocks_kernel[(num_rows, triton.cdiv(num_blocks, BLOCKS))](
        logits_BV, rules.temperature_B, max_BN, mass_BN, vocab_size, num_blocks, logits_BV.stride(0),
        BLOCK=BLOCK, BLOCKS=BLOCKS,
    )  # fmt: skip
    any_restricted = any_restricted or num_stored > 0
    support = Support(tokens_B, tokens_B, max_BN, tokens_B)  # placeholders that no kernel reads
    if any_restricted:
        total_B = torch.empty(num_rows, dtype=torch.float64, device=logits_BV.device)
        _merge_kernel[(num_rows,)](rules.temperature_B, max_BN, mass_BN, total_B, num_blocks, **meta)
        support, sorted_BN = threshold_triton(logits_BV, rules, max_BN, total_B, meta["LEAVES"])
        if num_stored:
            support_BK = collect_triton(logits_BV, rules, support, sorted_BN, num_stored, meta["LEAVES"])
    restricted_B = rules.restricted(vocab_size).int() if any_restricted else tokens_B
    _draw_kernel[(num_rows,)](
        logits_BV, bits_B, rules.temperature_B, rules.floor_B, max_BN, mass_BN, restricted_B, support.least_B,
        support.last_B, support.masses_BN, tokens_B, numbers_3B, num_rows, vocab_size, num_blocks, logits_BV.stride(0),
        RESTRICTED=any_restricted, BLOCK=BLOCK, OVER=over, INSIDE=LEVELS_INSIDE, **meta,
    )  # fmt: skip
    return Sampled(tokens_B, *numbers_3B.unbind(), support_BK)


@torch.no_grad()
def sample(
    logits_BV: Tensor, bits_B, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, num_stored: int = 0
) -> Sampled:
    """Samples a token per row.

    bits_B: int64, from philox.random_bits; tensor or numpy.
    temperature, top_k, top_p, min_p: numbers or tensors [B]. temperature 0 takes the lowest id among the largest
        logits; top_k 0 is off.
    num_stored: K: the support is limited to the K most likely tokens, and their ids are returned.
    """
    rules = make_rules(logits_BV, temperature, top_k, top_p, min_p, num_stored)
    bits_B = torch.as_tensor(bits_B, device=logits_BV.device)
    # reading a tensor's values would wait for the GPU
    numbers = not any(isinstance(value, Tensor) for value in (temperature, top_k, top_p, min_p))
    is_open = numbers and temperature != 0 and (top_k, top_p, min_p, num_stored) == (0, 1, 0, 0)
    if logits_BV.is_cuda and logits_BV.dtype != torch.float64:
        return sample_triton(logits_BV, bits_B, rules, num_stored, not is_open)
    return sample_cpu(logits_BV, bits_B, rules, num_stored, not is_open)
