"""A decode step inside the engine, which `python -m bench first-light` measures on a GPU at 7B shape."""

import statistics
import time

import torch

from bench.speed import generate_peers as peers
from bench.speed.generate_costs import products_of
from bench.speed.roofline import precision_of
from rlhf_spmd.kernels.philox import random_bits
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.generation.cuda_graphs import OCCURRENCES
from rlhf_spmd.runtime.generation.engine import Engine
from rlhf_spmd.runtime.generation.kv_cache import token_bytes
from rlhf_spmd.runtime.generation.random_streams import OFFLINE
from rlhf_spmd.runtime.generation.requests import Sampling

ROWS, CONTEXT, STEPS = 64, 1024, 48
STEP_SHARE = 0.70  # promised share of the memory bandwidth
LEAST = 4.0  # promised times faster than the faster of transformers' ways


def decode_step(mine: Transformer, ceilings: dict, *, rows: int = ROWS, context: int = CONTEXT) -> dict:
    """Measures the row of a decode step inside the engine: the time from one round to the next, scheduling and sampling
    included, once every prompt is in the cache."""
    prompt = context - STEPS // 2
    work = peers.to_the_limit(mine.config.vocab_size, num=rows, new=STEPS, prompt=prompt)
    engine = Engine(mine, longest=work.longest, max_sequences=rows)
    bits_RG = torch.from_numpy(random_bits(1, OFFLINE, 0, range(rows), [0] * rows, STEPS))
    engine.submit(work.prompts_RP.tolist(), bits_RG, Sampling(STEPS))
    rounds: list[tuple[float, int]] = []

    def note(num_ended: int, num_tokens: int) -> None:  # the device is a round ahead, in each of them
        rounds.append((time.perf_counter(), num_tokens))

    engine.run(progress=note)
    # a round with a prefill draws the first tokens of new rows besides; a graph is captured some rounds later
    first = next(i for i, (_, num) in enumerate(rounds) if num == rows and i > 0) + 2 + OCCURRENCES
    seconds = [rounds[i][0] - rounds[i - 1][0] for i in range(first, len(rounds)) if rounds[i][1] == rows]
    num_bytes = sum(weight.nbytes for weight in products_of(mine)) + rows * context * token_bytes(mine)
    step_s = statistics.median(seconds)
    share = num_bytes / step_s / ceilings["memory_bytes_per_s"]
    return {
        "work": f"a decode step, {rows} rows, {context} tokens each",
        "dtype": precision_of(mine.dtype),
        "step_s": step_s,
        "steps": len(seconds),
        "bytes": num_bytes,
        "share_of_memory": share,
        "promised": STEP_SHARE,
        "ok": share >= STEP_SHARE,
    }
