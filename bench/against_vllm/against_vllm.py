"""How much faster than vLLM's CPU backend does this program generate, with the same weights and the same requests?

vLLM lives in an environment of its own (`make peers-vllm`), in which it runs as it is by default. SmolLM2-135M in
float32 and bfloat16, 32 sequences at a time, two threads: (a) every response runs to 256 tokens; (b) 128 responses of
lengths spread over 1 to 256, and both programs give the places of those that have ended to the next. Prompts have 32
random tokens, temperature is 1, and ends are ignored. Ours computes the logprobs of its tokens, too. The programs take
turns, and while one works the other waits. The first pass of each is not counted; its seconds, and those in which vLLM
loads and compiles the model, are in the rows. If one takes twice the other's seconds there, a single pass counts.
Without the package, or where it does not load, the bench says why and measures nothing.

Cost on two idle cores: twenty minutes, and a few more for vLLM's compilations; without AVX-512 an hour in bfloat16.
Command: python -m bench against-vllm [--quick] [--precision float32|bfloat16]
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.against_trl.steps import Worker
from bench.rows import REPOSITORY, Arguments, keep, provenance
from bench.speed import generate_peers as peers
from bench.speed.generate import CASE, DTYPES, PLACES, REPEATS, SMOLLM2, THREADS
from bench.speed.generate_compare import row_of, take_turns
from bench.speed.roofline import precision_of
from bench.tables import text_table
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.profile.machine import cpu_info, details

PEER = REPOSITORY / ".venv-peers-vllm" / "bin" / "python"
LEAST = {"float32": 1.1, "bfloat16": 1.0}  # promised ratios
CLEAR = 2.0  # a ratio of the first passes that needs no median
FULL, QUICK = {"limit": 256, "num": 128}, {"limit": 32, "num": 64}
VERSIONS = "import vllm, torch; print(vllm.__version__, torch.__version__)"


def main(arguments: list[str]) -> int:
    parser = Arguments("against-vllm", __doc__)
    parser.add_argument("--quick", action="store_true", help="once, and less of it; judges and writes nothing")
    parser.add_argument("--precision", choices=list(LEAST), help="only this one; the rows of the other stay")
    parsed = parser.parse_args(arguments)
    if not (SMOLLM2 / "model.safetensors").is_file():
        parser.error(f"{SMOLLM2} is not there; `make .cache/smollm2-135m/model.safetensors` fetches and converts it")
    versions, reason = versions_of_peer()
    if reason:
        print(json.dumps({"bench": "against-vllm", "skipped": reason}))
        return 0
    torch.set_num_threads(THREADS)
    rows = []
    for dtype in (dtype for dtype in DTYPES if parsed.precision in (None, precision_of(dtype))):
        with tempfile.TemporaryDirectory(prefix="against_vllm_") as folder:
            rows += measured(dtype, Path(folder), QUICK if parsed.quick else FULL, 1 if parsed.quick else REPEATS)
    if not parsed.quick:
        about = provenance()
        about["versions"] |= versions
        rows = [{"bench": "against-vllm", "processor": processor()} | row | about for row in rows]
        keep("against_vllm", rows, CASE)
    ok = parsed.quick or all(row["ok"] for row in rows)
    print(json.dumps({"bench": "against-vllm", "ok": ok}))
    return 0 if ok else 1


def versions_of_peer() -> tuple[dict[str, str], str]:
    """Returns the versions of vLLM and of what computes in its environment, or why it cannot run."""
    if not PEER.exists():
        return {}, f"vLLM's environment {PEER.parents[1].name} is not there; `make peers-vllm` makes it"
    told = {"capture_output": True, "encoding": "utf-8", "errors": "replace"}
    done = subprocess.run([str(PEER), "-c", VERSIONS], check=False, **told)
    if done.returncode:
        return {}, f"vLLM does not load: {(done.stderr.strip().splitlines() or [f'status {done.returncode}'])[-1]}"
    return dict(zip(["vllm", "its torch"], done.stdout.splitlines()[-1].split(), strict=True)), ""


def measured(dtype: torch.dtype, folder: Path, sizes: dict[str, int], repeats: int) -> list[dict]:
    """Measures a row for each kind of requests."""
    theirs = peers.without_ends(peers.AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=dtype).eval())
    mine, library = peers.same_weights(theirs, dtype), peers.use_fastest(dtype)
    works = peers.works(theirs.config.vocab_size, places=PLACES, **sizes)
    job = {"model": str(SMOLLM2), "dtype": precision_of(dtype), "places": PLACES, "cache": str(folder)}
    job |= {"longest": peers.PROMPT + FULL["limit"], "cores": sorted(os.sched_getaffinity(0))[:THREADS]}
    worker = Worker([str(PEER), "-m", "bench.against_vllm.vllm_worker", json.dumps(job)], folder / "vllm.log")
    try:
        load_s = worker.answer()["load_s"]
        return [row | {"products": library} for row in rows_of(works, mine, worker, repeats, load_s)]
    finally:
        worker.end()


def rows_of(
    works: dict[str, peers.Workload], mine: Transformer, worker: Worker, repeats: int, load_s: float
) -> Iterator[dict]:
    for work in works.values():
        calls = {
            "ours": lambda work=work: peers.by_ours(mine, work),
            "vllm": lambda work=work: by_vllm(worker, work),
        }
        first = take_turns(calls, 1)
        slowest_s, fastest_s = max(first.values())[0], min(first.values())[0]
        passes = 1 if slowest_s > CLEAR * fastest_s else repeats
        row = row_of(work, mine.dtype, take_turns(calls, passes))
        row |= {"passes": passes, "model": "SmolLM2-135M", "threads": THREADS, "peer_load_s": load_s}
        row |= {"ours_first_s": first["ours"][0], "peer_first_s": first["vllm"][0], "promised": LEAST[row["dtype"]]}
        row["ok"] = row["ratio"] >= row["promised"]
        print(text_table("against_vllm", [row]), flush=True)
        yield row


def by_vllm(worker: Worker, work: peers.Workload) -> int:
    """Generates by vLLM. Returns the tokens."""
    worker.tell(prompts=work.prompts_RP.tolist(), lengths=work.lengths)
    tokens = worker.answer()["tokens"]
    assert tuple(tokens) == work.lengths, "responses of other lengths"
    return sum(tokens)


def processor() -> list[str]:
    return [*details(cpu_info()), torch.backends.cpu.get_cpu_capability()]
