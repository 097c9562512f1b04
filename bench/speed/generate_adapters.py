"""How fast is generation with adapters (LoRA), apart from the weights or in copies of them, against the same model
without adapters?

A random model of SmolLM2-135M's shape with and without adapters of rank 16 in all linear layers, 32 sequences of 32
tokens and 128 new ones, by turns in one process and on one thread. Copies are made in each turn, as in each iteration
of a run with lora.generate=joined. Promised: 0.85 times the tokens/s in both precisions with adapters apart.
On a busy machine processor time says more than seconds, so both are in the rows, as medians of ratios.

Cost: eight minutes of one core. Command: python -m bench generate-adapters [--precision float32|bfloat16] [--repeats 5]
"""

import time
from statistics import median

import torch

from bench.rows import Arguments, keep
from bench.speed import generate_peers as peers
from bench.tables import ended
from rlhf_spmd.model.linear import lay_adjacent, sum_bytes
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.adapters import Adapters
from rlhf_spmd.plan.workload import ModelShape

SMOLLM2 = ModelShape(30, 576, 1536, 9, 3, 64, 49152, tied=True)
RANK, PLACES, NEW, LEAST = 16, 32, 128, 0.85
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


def compare(precision: str, repeats: int) -> dict:
    """Measures the row of a precision."""
    dtype = getattr(torch, precision)
    (dense, adapted), library = models(dtype), peers.use_fastest(dtype)
    ways = {"dense": (dense, False), "apart": (adapted, False), "joined": (adapted, True)}
    work = peers.to_the_limit(SMOLLM2.vocab_size, num=PLACES, new=NEW)
    for model, joins in ways.values():
        peers.by_ours(model, peers.shortened(work, 4), adds_adapters=joins)
    walls: dict[str, list[float]] = {name: [] for name in ways}  # dense seconds over those of each way
    processors: dict[str, list[float]] = {name: [] for name in ways}
    seconds = []
    for turn in range(repeats):
        wall, processor = {}, {}
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            model, joins = ways[name]
            began, used = time.perf_counter(), time.process_time()
            peers.by_ours(model, work, adds_adapters=joins)
            wall[name], processor[name] = time.perf_counter() - began, time.process_time() - used
        for name in ways:
            walls[name].append(wall["dense"] / wall[name])
            processors[name].append(processor["dense"] / processor[name])
        seconds.append(processor["apart"])
        shown = ", ".join(f"{name} {walls[name][-1]:.3f} ({processors[name][-1]:.3f})" for name in ways)
        print(f"{precision} by seconds (by processor time): {shown}", flush=True)
    ratio = median(processors["apart"])
    row = {"bench": "generate-adapters", "model": "shape of SmolLM2-135M", "dtype": precision, "products": library}
    row |= {"rank": RANK, "rows": PLACES, "new_tokens": NEW, "repeats": repeats, "ratio": ratio}
    row |= {"ratio_by_seconds": median(walls["apart"]), "processor_tokens_per_s": work.num_tokens / median(seconds)}
    row |= {"joined_ratio": median(processors["joined"]), "joined_ratio_by_seconds": median(walls["joined"])}
    return row | {"joined_bytes": sum_bytes(adapted), "promised": LEAST, "ok": ratio >= LEAST}


def main(arguments: list[str]) -> int:
    parser = Arguments("generate-adapters", __doc__)
    parser.add_argument("--precision", choices=PRECISIONS, help="only this one")
    parser.add_argument("--repeats", type=int, default=5, help="turns of all three")
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = [compare(one, parsed.repeats) for one in PRECISIONS if parsed.precision in (None, one)]
    keep("generate_adapters", rows, ("dtype",), lambda row: PRECISIONS.index(row["dtype"]))
    return ended("generate-adapters", rows)
