"""Compiles the Triton kernels without a GPU: calls their launchers, which compile but do not launch.

What the interpreter runs, the compiler may still refuse (a type that changes in a loop, too much shared memory), so
this finds before any GPU does what a GPU would find first. Prints one JSON object: kernel -> how often it was compiled
anew, how often of these because the number of rows was another one, and the most shared memory and bytes of spilled
registers that one takes.

Command: python -m tests.compile_kernels 90 bfloat16 float32   (compute capability 9.0, or gfx942 for an MI300; not with
TRITON_INTERPRET=1). With --few each kernel has fewer sizes, which takes a third of the time.
"""

import importlib
import json
import pkgutil
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from rlhf_spmd import kernels
from rlhf_spmd.kernels.decode_attention import decode_attention_triton
from rlhf_spmd.kernels.kv_write import kv_write_triton
from rlhf_spmd.kernels.rmsnorm import rmsnorm_backward_triton, rmsnorm_triton
from rlhf_spmd.kernels.rope import rope_triton
from rlhf_spmd.kernels.sample import sample_triton
from rlhf_spmd.kernels.silu_mul import silu_mul_triton, swiglu_backward_triton
from rlhf_spmd.kernels.support import make_rules
from rlhf_spmd.kernels.token_logprobs import token_logprobs_triton
from tests.launches import name_of, recorded, spilled_bytes

NUM_ROWS = (15, 1, 16, 17)  # the compiler knows 1 and multiples of 16 from the others
# of a head, heads, and heads of the cache; Gemma 2B's is the widest
HEADS, SIZES, VOCABULARIES = ((80, 7, 1), (128, 8, 2), (256, 8, 1)), (4096, 96, 8192), (1000, 151_936)
PARTS = ((4, 100, None), (1, None, None), (1, None, 50.0))  # of the cache, a window, and a cap


def attention(dtype: torch.dtype, num: int, few: int | None) -> None:
    tables, lengths = torch.zeros(num, num, dtype=torch.int32), torch.ones(num, dtype=torch.int32)
    for head_dim, heads, kv_heads in HEADS[:few]:
        q, cache = torch.zeros(num, heads, head_dim, dtype=dtype), torch.zeros(9, kv_heads, 16, head_dim, dtype=dtype)
        for num_parts, window, cap in PARTS[:few]:
            options = {"num_parts": num_parts, "window": window, "cap": cap}
            decode_attention_triton(q, cache, cache, tables, lengths, **options)
        slots = torch.zeros(num, dtype=torch.int64)
        kv_write_triton(q[:, :kv_heads], q[:, :kv_heads], cache, cache, slots)
        for back in (False, True):
            rope_triton(q, q[:, :kv_heads], q[:, 0, : head_dim // 2], q[:, 0, : head_dim // 2], back=back)


def rows(dtype: torch.dtype, num: int, few: int | None) -> None:
    for size in SIZES[:few]:
        x = torch.zeros(num, size, dtype=dtype)
        rmsnorm_triton(x, x[0], 1e-5, x)
        rmsnorm_triton(x, x[0].float(), 1e-5, x)
        rmsnorm_triton(x.view(num, 2, -1), x[0, : size // 2], 1e-5)
        for wants_weight in (False, True):
            rmsnorm_backward_triton(x, x, x, x[0], 1e-5, wants_weight=wants_weight)
            rmsnorm_backward_triton(x, x, x, x[0].float(), 1e-5, wants_weight=wants_weight)
            heads = x.view(num, 2, -1)
            rmsnorm_backward_triton(heads, None, heads, x[0, : size // 2], 1e-5, wants_weight=wants_weight)
        silu_mul_triton(*x.chunk(2, dim=1))
        swiglu_backward_triton(x[:, : size // 2].contiguous(), *x.chunk(2, dim=1))


def logprobs(dtype: torch.dtype, num: int, few: int | None) -> None:
    hidden, weight = (torch.zeros(n, 32, dtype=dtype, requires_grad=True) for n in (num, 1000))
    for entropy in (False, True):
        got = token_logprobs_triton(
            hidden, weight, torch.zeros(num, dtype=torch.int64), temperature=0.7, entropy=entropy
        )
        torch.stack(got if entropy else (got,)).sum().backward()


def sampling(dtype: torch.dtype, num: int, few: int | None) -> None:
    for vocab_size in VOCABULARIES[:few]:
        logits, bits = torch.zeros(num, vocab_size, dtype=dtype), torch.zeros(num, dtype=torch.int64)
        for top_k, num_stored in ((50, 64), (50, 0), (0, 0))[: few and 2]:
            rules = make_rules(logits, 0.7, top_k, 0.9 if top_k else 1.0, 0.0, num_stored)
            sample_triton(logits, bits, rules, num_stored, bool(top_k))


CASES = (attention, rows, logprobs, sampling)


def all_kernels() -> set[str]:
    """Returns every kernel that kernels/ defines: its jitted functions with a name that ends so."""
    modules = (importlib.import_module(f"{kernels.__name__}.{m.name}") for m in pkgutil.iter_modules(kernels.__path__))
    found = (value for module in modules for value in vars(module).values() if isinstance(value, JITFunction))
    return {name_of(kernel) for kernel in found if kernel.__name__.endswith("_kernel")}


def main(device: str, dtypes: list[torch.dtype], few: int | None) -> dict[str, dict]:
    """Compiles for a device.

    few: so many sizes of each kind; None: all.
    """
    found: dict[str, dict] = {name: {"versions": 0, "for_rows": 0} for name in all_kernels()}
    target = GPUTarget("cuda", int(device), 32) if device.isdigit() else GPUTarget("hip", device, 64)
    with recorded(target) as launches:
        for case in CASES:
            for dtype in dtypes:
                versions = []
                for num in NUM_ROWS:
                    begin = len(launches)
                    case(dtype, num, few)
                    versions.append({(launch.kernel, launch.compiled) for launch in launches[begin:]})
                for kernel, _ in set().union(*versions[1:]) - versions[0]:
                    found[kernel]["for_rows"] += 1
    for kernel, compiled in {(launch.kernel, launch.compiled) for launch in launches}:
        row = found[kernel]
        row["versions"] += 1
        row["shared_bytes"] = max(row.get("shared_bytes", 0), compiled.metadata.shared)
        row["spill_bytes"] = max(row.get("spill_bytes", 0), spilled_bytes(compiled))
    return found


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--few"]
    few = 1 if len(words) < len(sys.argv) - 1 else None
    print(json.dumps(main(words[0], [getattr(torch, name) for name in words[1:]], few)))
