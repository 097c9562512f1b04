"""How fast is generation with adapters (LoRA), apart from the weights or in copies of them, against the same model
without adapters?

A random model of SmolLM2-135M's shape with and without adapters of rank 16 in all linear layers, 32 sequences of 32
tokens and 128 new ones, by turns in one process and on one thread. Copies are made in each turn, as in each iteration
of a run with lora.generate=joined. Promised: 0.85 times the tokens/s in both precisions with adapters apart.
On a busy machine processor time says more than seconds, so both are in the rows, as medians of ratios.

Cost: eight minutes of one core. Command: python -m bench generate-adapters
"""

import time
from functools import partial
from statistics import median

import torch

from bench.rows import Arguments, write
from bench.speed import generate_peers as peers
from bench.speed.requests import by_ours, shortened, to_the_limit
from bench.speed.roofline import in_turns
from bench.tables import ended
from rlhf_spmd.model.linear import lay_adjacent, sum_bytes
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.adapters import Adapters
from rlhf_spmd.plan.workload import ModelShape

SMOLLM2 = ModelShape(30, 576, 1536, 9, 3, 64, 49152, tied=True)
RANK, PLACES, NEW, LEAST, REPEATS = 16, 32, 128, 0.85, 5
PRECISIONS = ("float32", "bfloat16")


def models(dtype: torch.dtype) -> tuple[Transformer, Transformer]:
    """Returns models without and with adapters, on the same weights."""
    dense = peers.same_weights(peers.random_model(SMOLLM2, dtype, torch.device("cpu")), dtype)
    lay_adjacent(dense.layers.values())  # as those of a run are
    adapted, generator = dense.with_adapters(Adapters(RANK, 32.0)), torch.Generator().manual_seed(0)
    for name, one in adapted.named_parameters():
        if name.endswith("lora_B"):
            one.normal_(0.0, 0.02, generator=generator)
    return dense, adapted


def seconds_of(call: partial) -> dict[str, float]:
    """Measures seconds, and those of the processor."""
    began, used = time.perf_counter(), time.process_time()
    call()
    return {"wall": time.perf_counter() - began, "processor": time.process_time() - used}


def compare(precision: str) -> dict:
    """Measures the row of a precision."""
    dtype = getattr(torch, precision)
    (dense, adapted), library = models(dtype), peers.use_fastest(dtype)
    ways = {"dense": (dense, False), "apart": (adapted, False), "joined": (adapted, True)}
    work, calls = to_the_limit(SMOLLM2.vocab_size, num=PLACES, new=NEW), {}
    for name, (model, joins) in ways.items():
        by_ours(model, shortened(work, 4), adds_adapters=joins)
        calls[name] = partial(seconds_of, partial(by_ours, model, work, adds_adapters=joins))
    rounds = in_turns(calls, REPEATS)

    def ratio(name: str, clock: str) -> float:
        return median(one["dense"][clock] / one[name][clock] for one in rounds)

    return {
        "bench": "generate-adapters",
        "model": "shape of SmolLM2-135M",
        "dtype": precision,
        "products": library,
        "rank": RANK,
        "rows": PLACES,
        "new_tokens": NEW,
        "repeats": REPEATS,
        "ratio": ratio("apart", "processor"),
        "ratio_by_seconds": ratio("apart", "wall"),
        "processor_tokens_per_s": work.num_tokens / median(one["apart"]["processor"] for one in rounds),
        "joined_ratio": ratio("joined", "processor"),
        "joined_ratio_by_seconds": ratio("joined", "wall"),
        "joined_bytes": sum_bytes(adapted),
        "promised": LEAST,
        "ok": ratio("apart", "processor") >= LEAST,
    }


def main(arguments: list[str]) -> int:
    Arguments("generate-adapters", __doc__).parse_args(arguments)
    torch.set_num_threads(1)
    rows = list(map(compare, PRECISIONS))
    write("generate_adapters", rows)
    return ended("generate-adapters", rows)
