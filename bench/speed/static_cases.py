"""The launches of 7B and 70B models whose compiled kernels `python -m bench kernels --static` looks at, the bytes that
each has to move, and why some move more (static_cases.toml).

Tensors are laid out as model/ and runtime/ lay them out on a GPU, in bfloat16.
"""

# B rows, N tokens, V vocabulary, D hidden, I intermediate, H heads, K key-value heads, d head dim, s slots of a block

import math
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from bench.speed.occupancy import PROCESSORS
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.kernels import decode_attention
from rlhf_spmd.kernels.kv_write import kv_write_triton
from rlhf_spmd.kernels.rmsnorm import rmsnorm_triton
from rlhf_spmd.kernels.rope import rope_triton
from rlhf_spmd.kernels.sample import sample_triton
from rlhf_spmd.kernels.silu_mul import silu_mul_triton
from rlhf_spmd.kernels.support import make_rules
from rlhf_spmd.kernels.token_logprobs import token_logprobs_triton
from rlhf_spmd.plan.workload import ModelShape

DTYPE = torch.bfloat16
ROWS, CONTEXT, TOKENS = 64, 1024, 8192  # of a decode step; of a prompt pass or a micro-batch of training
BLOCK_SIZE = 16  # of the KV cache on a GPU
HIDDEN = 16  # of logprobs: the products are torch's, and the kernels see only logits
VOCABULARIES = (32_000, 128_256)  # of Llama 2 and 3
SHARES = {"llama-7b": (1,), "llama-70b": (1, 8)}  # tensor parallel sizes
RULES = {"plain": ({}, 0), "top-p 0.95": ({"top_p": 0.95}, 0), "top-k 50, stored": ({"top_k": 50}, 64)}


@dataclass(frozen=True, slots=True)
class Case:
    """A call of launchers. run(device): on "meta" for the compiler, on "cpu" for the interpreter."""

    what: str  # model and pass
    shape: str
    run: Callable[[torch.device], object]


def zeros(*shape: int, device: torch.device) -> Tensor:
    """Returns zeros in memory that takes no space before it is written: most rows of a case never run."""
    if device.type == "meta":
        return torch.empty(shape, dtype=DTYPE, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * DTYPE.itemsize, np.uint8)).view(DTYPE).view(shape)


def normalise(device: torch.device, num: int, size: int, *, adds: bool) -> None:
    x, residual = (zeros(num, size, device=device) for _ in range(2))
    rmsnorm_triton(x, zeros(size, device=device), 1e-5, residual if adds else None)


def turn(device: torch.device, num: int, heads: tuple[int, int, int]) -> None:
    num_heads, kv_heads, head_dim = heads
    q, k = (zeros(num, n, head_dim, device=device) for n in (num_heads, kv_heads))
    rope_triton(q, k, *(zeros(num, head_dim // 2, device=device) for _ in range(2)))


def write(device: torch.device, num: int, heads: tuple[int, int, int]) -> None:
    _, kv_heads, head_dim = heads
    k, v = (zeros(num, kv_heads, head_dim, device=device) for _ in range(2))
    cache = [zeros(-(-num // BLOCK_SIZE), kv_heads, BLOCK_SIZE, head_dim, device=device) for _ in range(2)]
    kv_write_triton(k, v, *cache, torch.arange(num, device=device))


def gate(device: torch.device, num: int, inner: int) -> None:
    silu_mul_triton(*(zeros(num, inner, device=device) for _ in range(2)))


def attend(device: torch.device, rows: int, context: int, heads: tuple[int, int, int]) -> None:
    """Computes attention. The cache holds just the rows' blocks, all of them full."""
    num_heads, kv_heads, head_dim = heads
    per_row = context // BLOCK_SIZE
    keys, values = (zeros(rows * per_row, kv_heads, BLOCK_SIZE, head_dim, device=device) for _ in range(2))
    tables_BM = torch.arange(rows * per_row, dtype=torch.int32, device=device).view(rows, per_row)
    lengths_B = torch.full((rows,), context, dtype=torch.int32, device=device)
    q = zeros(rows, num_heads, head_dim, device=device)
    with patch.object(decode_attention, "processors", lambda device: PROCESSORS):
        decode_attention.decode_attention_triton(q, keys, values, tables_BM, lengths_B)


def draw(device: torch.device, rows: int, vocab: int, rule: str) -> None:
    """Draws tokens. Random logits are flatter than those of a trained model: a threshold is harder to find."""
    logits_BV = zeros(rows, vocab, device=device)
    bits_B = torch.zeros(rows, dtype=torch.int64, device=device)
    if device.type != "meta":
        generator = torch.Generator(device).manual_seed(0)
        logits_BV.normal_(0.0, 3.0, generator=generator)
        bits_B.random_(generator=generator)
    limits, num_stored = RULES[rule]
    rules = make_rules(logits_BV, 0.8, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0} | limits, num_stored=num_stored)
    sample_triton(logits_BV, bits_B, rules, num_stored, rule != "plain")


def score(device: torch.device, num: int, vocab: int, *, entropy: bool) -> None:
    """Computes logprobs forward and backward; the logits come in chunks of the vocabulary."""
    hidden_ND, weight_VD = (torch.zeros(n, HIDDEN, dtype=DTYPE, device=device).requires_grad_() for n in (num, vocab))
    tokens_N = torch.zeros(num, dtype=torch.int64, device=device)
    with torch.enable_grad():
        found = token_logprobs_triton(hidden_ND, weight_VD, tokens_N, entropy=entropy)
        sum(x.sum() for x in (found if entropy else (found,))).backward()


def all_cases() -> Iterator[Case]:
    for model, tensor_parallel in SHARES.items():
        shape = make_workload(load(model)).models["actor"]
        for tp in tensor_parallel:
            yield from of_layer(model if tp == 1 else f"{model}, tp {tp}", shape, tp)
    for vocab in VOCABULARIES:
        for rule in RULES:
            yield Case("sampling", f"[{ROWS}, {vocab}] {rule}", partial(draw, rows=ROWS, vocab=vocab, rule=rule))
        for entropy in (False, True):
            run = partial(score, num=TOKENS, vocab=vocab, entropy=entropy)
            yield Case("logprobs", f"[{TOKENS}, {vocab}]{' and entropy' if entropy else ''}", run)


def of_layer(model: str, shape: ModelShape, tp: int) -> Iterator[Case]:
    """Yields the kernels of a layer of generation, of a decode step and of prompts."""
    heads = shape.num_heads // tp, shape.num_kv_heads // tp, shape.head_dim
    inner, of_heads = shape.intermediate_size // tp, f"{heads[0]}/{heads[1]} heads of {heads[2]}"
    for name, num in (("decode", ROWS), ("prompts", TOKENS)):
        what = f"{model}, {name}"
        if tp == 1:
            for adds in (True, False):
                with_sum = " with residual" if adds else ""
                run = partial(normalise, num=num, size=shape.hidden_size, adds=adds)
                yield Case(what, f"[{num}, {shape.hidden_size}]{with_sum}", run)
        yield Case(what, f"{num} tokens, {of_heads}", partial(turn, num=num, heads=heads))
        yield Case(what, f"{num} tokens, {of_heads}", partial(write, num=num, heads=heads))
        if name == "decode":
            run = partial(attend, rows=ROWS, context=CONTEXT, heads=heads)
            yield Case(what, f"{ROWS} rows of {CONTEXT} tokens, {of_heads}", run)
        yield Case(what, f"[{num}, {inner}]", partial(gate, num=num, inner=inner))


# ---- the bytes that a launch has to move -----------------------------------------------------------------------------


def num_bytes(*tensors: Tensor) -> int:
    """Returns the bytes of the elements, wherever they lie."""
    return sum(x.numel() * x.element_size() for x in tensors)


KERNELS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
WHOLE = {kernel: known["whole"] for kernel, known in KERNELS.items() if "whole" in known}
REASONS = {kernel: known["read_again"] for kernel, known in KERNELS.items() if "read_again" in known}


def needed_bytes(kernel: str, arguments: dict) -> int | None:
    """Returns the bytes that a launch has to read and write, each input and output once; None where the numbers decide
    (how many blocks of a row may hold its threshold)."""
    if kernel not in WHOLE:
        return None
    names, beside = WHOLE[kernel], KERNELS[kernel].get("beside")
    if beside and arguments[beside["argument"]] > beside["above"]:
        names = names + beside["tensors"]
    return num_bytes(*(arguments[name] for name in names))
