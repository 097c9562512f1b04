"""How much faster than transformers' `generate` is ours, and how near to what the device can do?

The same weights at the same precision take turns in one run, 32 sequences at a time: (a) every response runs to the
limit; (b) responses of realistic lengths, where ours refills the places of those that have ended and a batch of
transformers lasts until its longest has. Only tokens of responses count. Shares are of the floor of a decode step by
the memory bandwidth and the rate of matrix products that the run itself measures. The models are a random Llama of 28 M
parameters, and with --smollm2 SmolLM2-135M instead. On CPUs; on a GPU `bench first-light` compares the same.

Cost: five minutes on two cores, twenty with --smollm2, one with --quick (which judges and writes nothing), a quarter of
one with --ours (only our generation, on one thread: work of which `tools unchanged` measures the processor time).
Command: python -m bench generate [--smollm2] [--quick | --ours]
"""

from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from bench.rows import Arguments, keep
from bench.speed import generate_peers as peers
from bench.speed import requests
from bench.speed.roofline import ceilings_of, elapsed_s, floor, name_of, precision_of
from bench.tables import ended, text_table
from rlhf_spmd.model.transformer import Transformer

CPU = torch.device("cpu")
PLACES = 32
THREADS = 2
REPEATS = 3
LEAST = {"limit": 1.5, "spread": 2.5}  # promised ratios on a CPU
CASE = ("model", "device", "dtype", "work")  # what tells rows apart
DTYPES = (torch.float32, torch.bfloat16)


def with_floor(row: dict, work: requests.Workload, mine: Transformer, ceilings: dict) -> dict:
    """Returns a row of responses that all run to the limit, with its floor."""
    steps = work.lengths[0]
    costs, step_s = floor(mine, work.places, work.prompts_RP.shape[1] + steps / 2, ceilings), row["ours_s"] / steps
    return row | costs | {"step_s": step_s, "share_of_floor": costs["floor_s"] / step_s}


def on_cpu(folder: Path | None, ceilings: dict, *, quick: bool) -> list[dict]:
    """Measures rows of the small model, or of the one in a folder."""
    rows, (limit, num) = [], (128, 64) if quick else (256, 128)
    for dtype in DTYPES:
        theirs, library = peers.model_of(folder, dtype), peers.use_fastest(dtype)
        mine, vocab_size = peers.same_weights(theirs, dtype), theirs.config.vocab_size
        for kind, work in requests.works(vocab_size, num=num, places=PLACES, limit=limit).items():
            row = peers.compare(work, theirs, mine, repeats=1 if quick else REPEATS, options={"transformers": {}})
            row |= {"model": "SmolLM2-135M" if folder else "Llama 28 M", "promised": LEAST[kind], "products": library}
            row["ok"] = row["ratio"] >= row["promised"]
            if kind == "limit":
                row = with_floor(row, work, mine, ceilings)
            print(text_table("generate", [row]), flush=True)
            rows.append(row)
    return rows


def ours_only() -> None:
    """Prints our tokens per second with the small model, without peers and ceilings."""
    for dtype in DTYPES:
        mine = peers.same_weights(peers.model_of(None, dtype), dtype)
        peers.use_fastest(dtype)
        for work in requests.works(peers.SMALL.vocab_size, num=64, places=PLACES, limit=64).values():
            taken_s = elapsed_s(partial(requests.by_ours, mine, work))
            print(f"{precision_of(dtype)}, {work.name}: {work.num_tokens / taken_s:,.0f} tokens/s", flush=True)


def main(arguments: list[str]) -> int:
    parser = Arguments("generate", __doc__)
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2-135M instead of the random model")
    parser.add_argument("--quick", action="store_true", help="once, and less of it; judges and writes nothing")
    parser.add_argument("--ours", action="store_true", help="only ours; judges and writes nothing")
    parsed = parser.parse_args(arguments)
    if parsed.ours:
        torch.set_num_threads(1)  # threads that wait for one another would count as work
        ours_only()
        return 0
    torch.set_num_threads(THREADS)
    rows = on_cpu(peers.smollm2() if parsed.smollm2 else None, ceilings_of(CPU, *DTYPES), quick=parsed.quick)
    if parsed.quick:
        return ended("generate", rows, ok=True)
    about = {"bench": "generate", "device": name_of(CPU), "transformers": version("transformers")}
    keep("generate", [about | row for row in rows], CASE)
    return ended("generate", rows)
