"""How much faster than vLLM's CPU backend does this program generate, with the same weights and the same requests?

vLLM lives in an environment of its own (`make peers-vllm`), in which it runs as it is by default. SmolLM2-135M in
float32 and bfloat16, 32 sequences at a time, two threads: (a) every response runs to 256 tokens; (b) 128 responses of
lengths spread over 1 to 256, and both programs give the places of those that have ended to the next. Prompts have 32
random tokens, temperature is 1, and ends are ignored. Ours computes the logprobs of its tokens, too. The programs take
turns, and while one works the other waits. The first pass of each is not counted; its seconds, and those in which vLLM
loads and compiles the model, are in the rows. If one takes twice the other's seconds there, a single pass counts.

Cost on two idle cores: twenty minutes, and a few more for vLLM's compilations; without AVX-512 an hour in bfloat16.
Command: python -m bench against-vllm [--quick]
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from bench.against_trl.work import python_of, versions_of, worker
from bench.rows import Arguments, keep, provenance
from bench.speed import generate_peers as peers
from bench.speed import requests
from bench.speed.generate import CASE, DTYPES, PLACES, REPEATS, THREADS
from bench.speed.roofline import precision_of
from bench.tables import finished, text_table
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.profile.machine import cpu_info, details

LEAST = {"float32": 1.1, "bfloat16": 1.0}  # promised ratios
CLEAR = 2.0  # a ratio of the first passes that needs no median
FULL, QUICK = {"limit": 256, "num": 128}, {"limit": 32, "num": 64}


def main(arguments: list[str]) -> int:
    parser = Arguments("against-vllm", __doc__)
    parser.add_argument("--quick", action="store_true", help="once, and less of it; judges and writes nothing")
    quick = parser.parse_args(arguments).quick
    versions = versions_of(python_of("peers-vllm"), "vllm", "torch")
    torch.set_num_threads(THREADS)
    rows = []
    for dtype in DTYPES:
        with tempfile.TemporaryDirectory(prefix="against_vllm_") as folder:
            rows += measured(dtype, Path(folder), QUICK if quick else FULL, 1 if quick else REPEATS)
    if not quick:
        about = provenance()
        about["versions"] |= versions
        rows = [{"bench": "against-vllm", "processor": processor()} | row | about for row in rows]
        keep("against_vllm", rows, CASE)
    return finished("against-vllm", ok=quick or all(row["ok"] for row in rows))


def measured(dtype: torch.dtype, folder: Path, sizes: dict[str, int], repeats: int) -> list[dict]:
    """Measures a row for each kind of requests."""
    theirs, library = peers.model_of(peers.smollm2(), dtype), peers.use_fastest(dtype)
    mine = peers.same_weights(theirs, dtype)
    works = requests.works(theirs.config.vocab_size, places=PLACES, **sizes)
    job = {"model": str(peers.smollm2()), "dtype": precision_of(dtype), "places": PLACES, "cache": str(folder)}
    job |= {"longest": requests.PROMPT + FULL["limit"], "cores": sorted(os.sched_getaffinity(0))[:THREADS]}
    command = [python_of("peers-vllm"), "-m", "bench.against_vllm.vllm_worker", json.dumps(job)]
    with worker(command, folder / "vllm.log") as vllm:
        return [row | {"products": library} for row in rows_of(works, mine, vllm, repeats, vllm()["load_s"])]


def rows_of(
    works: dict[str, requests.Workload], mine: Transformer, vllm: Callable, repeats: int, load_s: float
) -> Iterator[dict]:
    for work in works.values():
        calls = {"ours": partial(requests.by_ours, mine, work), "vllm": partial(by_vllm, vllm, work)}
        first = peers.timed(calls, 1)
        passes = 1 if max(first.values()) > CLEAR * min(first.values()) else repeats
        row = peers.row_of(work, mine.dtype, peers.timed(calls, passes))
        row |= {"passes": passes, "model": "SmolLM2-135M", "threads": THREADS, "peer_load_s": load_s}
        row |= {"ours_first_s": first["ours"], "peer_first_s": first["vllm"], "promised": LEAST[row["dtype"]]}
        row["ok"] = row["ratio"] >= row["promised"]
        print(text_table("against_vllm", [row]), flush=True)
        yield row


def by_vllm(vllm: Callable, work: requests.Workload) -> None:
    """Generates by vLLM."""
    tokens = vllm(prompts=work.prompts_RP.tolist(), lengths=work.lengths)["tokens"]
    assert tuple(tokens) == work.lengths, "responses of other lengths"


def processor() -> list[str]:
    return [*details(cpu_info()), torch.backends.cpu.get_cpu_capability()]
