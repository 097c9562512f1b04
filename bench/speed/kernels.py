"""How close are the kernels to the device's ceilings, and how much faster than their peers?

Each kernel and its peers take turns in one run, on random data; shares are of the memory bandwidth and of the rate of
matrix products that the run itself measures. On a CPU: sampling, logprobs (also peak memory) and decode attention. The
cases of a GPU, with the small kernels of a decode step, packed prompts, and a whole decode step of 7B shape, are those
of `bench first-light`.

Cost: two minutes on two cores. Command: python -m bench kernels
"""

import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton  # noqa: F401  before the kernels, which load it by themselves on a GPU only

from bench.rows import Arguments, write
from bench.speed import kernel_cases as cases
from bench.speed.gpu_decode import DecodeBench
from bench.speed.kernel_cases import Case
from bench.speed.roofline import alternate, ceilings_of, name_of, precision_of
from bench.tables import ended, text_table
from rlhf_spmd.plan.workload import ModelShape
from rlhf_spmd.runtime.records.software import version_of

ROUNDS = 15
SLOW_ROUNDS = 3  # of what takes seconds on a CPU
GROUPED = (32, 8, 128)  # query heads, key-value heads, head dim of a model of 8B shape
STEP_SHARE = 0.70  # of the memory bandwidth: a decode step of 7B shape
PEAK_SHARE = 0.10  # of the bytes of full float32 logits: what logprobs take beside their gradients
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def cpu_cases(device: torch.device) -> Iterator[Case]:
    for vocab in (8192, 49152):
        for rule in cases.RULES:
            promise = {"least_speedup": {"transformers": 1.5}}
            yield cases.sampling(device, 32, vocab, torch.float32, rule, **promise)
    for dtype in (torch.float32, torch.bfloat16):
        for context, spread in ((128, False), (512, False), (512, True)):
            small = (8, 4, 64)
            promise = {"least_speedup": {"padded sdpa": 0.9}} if dtype == torch.float32 else {}
            yield cases.attending(device, 32, context, small, dtype, block_size=context, spread=spread, **promise)
        yield cases.attending(device, 32, 512, small, dtype, block_size=16, spread=True)
    yield cases.projection(device, 4096, 49152, 576, torch.float32, least_speedup={"full logits": 1 / 1.15})


def gpu_cases(device: torch.device) -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        for rule in cases.RULES:
            promise = {"least_share": 0.6} if rule == "plain" else {}
            yield cases.sampling(device, 256, 131072, dtype, rule, **promise)
    for rows in (1, 8, 64):
        for context in (1024, 8192):
            yield cases.attending(device, rows, context, GROUPED, torch.bfloat16, block_size=16)
    yield cases.attending(device, 64, 8192, GROUPED, torch.bfloat16, block_size=16, spread=True)
    for num in (64, 8192):
        yield cases.normalising(device, num, 4096, torch.bfloat16)
        yield cases.turning(device, num, GROUPED, torch.bfloat16)
        yield cases.gating(device, num, 11008, torch.bfloat16)
        yield cases.writing(device, num, GROUPED, torch.bfloat16)
    yield cases.prefilling(device, [64 + 30 * i for i in range(32)], GROUPED, torch.bfloat16)
    promise = {"least_speedup": {"full logits": 1 / 1.15}}
    yield cases.projection(device, 8192, 131072, 4096, torch.bfloat16, **promise)


def measure(case: Case, device: torch.device, ceilings: dict) -> dict:
    """Measures a row: seconds of all, ratios to ours, shares of the ceilings, and whether the promises held."""
    rounds = SLOW_ROUNDS if case.kernel == "token_logprobs" else ROUNDS
    with torch.no_grad():
        seconds = alternate(case.calls, device, rounds=rounds)
    ours_s = seconds.pop("ours")
    ratios = {name: peer_s / ours_s for name, peer_s in seconds.items()}
    row = {"kernel": case.kernel, "shape": case.shape, "dtype": precision_of(case.dtype)}
    row |= {"ours_s": ours_s, "peers_s": seconds, "times_faster": ratios}
    ok = all(ratios[name] >= least for name, least in case.least_speedup.items())
    if case.num_bytes:
        row["share_of_memory"] = case.num_bytes / ours_s / ceilings["memory_bytes_per_s"]
        ok &= row["share_of_memory"] >= case.least_share
    if case.flops:
        row["share_of_matrix"] = case.flops / ours_s / ceilings["matrix_flops_per_s"][row["dtype"]]
    promised = {f"times faster than {name}": least for name, least in case.least_speedup.items()}
    promised |= {"share of memory": case.least_share} if case.least_share else {}
    if case.kernel == "token_logprobs":
        row |= measure_peaks(case, device)
        promised["peak share of full logits"] = PEAK_SHARE
        ok &= row["peak_share"] is None or row["peak_share"] < PEAK_SHARE
    return row | {"promised": promised, "ok": bool(ok)}


def measure_peaks(case: Case, device: torch.device) -> dict:
    """Measures the bytes beyond inputs and gradients, against full logits in float32."""
    num, vocab = map(int, case.shape.split("]")[0][1:].split(", "))
    hidden = int(case.shape.split()[-1])
    gradients = (num + vocab) * hidden * case.dtype.itemsize
    peaks = {}
    for name, call in case.calls.items():
        case.forget()
        peaks[name] = peak_bytes(call, device)
    extra = {name: None if peak is None else max(peak - gradients, 0) for name, peak in peaks.items()}
    share = None if extra["ours"] is None else extra["ours"] / (4 * num * vocab)
    return {"extra_peak_bytes": extra, "peak_share": share}


def peak_bytes(call: Callable, device: torch.device) -> int | None:
    """Returns how far memory rises during a call that begins without gradients; None where the system does not tell."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed is given back, so that using it anew counts
        RESET.write_text("5", encoding="utf-8")  # Linux: the peak is now what is resident
        before = _status_bytes("VmRSS")
        call()
        return _status_bytes("VmHWM") - before
    except OSError:
        return None


def _status_bytes(name: str) -> int:
    line = next(line for line in STATUS.read_text(encoding="utf-8").splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def measure_step(device: torch.device, ceilings: dict, *, shape: ModelShape, rows: int, context: int) -> dict:
    """Measures the row of a whole decode step."""
    bench = DecodeBench(device, shape, rows=rows, context=context)
    step_s = alternate({"step": bench.captured()}, device, rounds=ROUNDS)["step"]
    share = bench.num_bytes / step_s / ceilings["memory_bytes_per_s"]
    what = f"{rows} rows, {context} tokens, {shape.num_layers} layers of {shape.hidden_size}"
    row = {"kernel": "decode step", "shape": what, "dtype": "bfloat16", "ours_s": step_s, "share_of_memory": share}
    promised = {"share of memory": STEP_SHARE}
    return row | {"peers_s": {}, "times_faster": {}, "promised": promised, "ok": share >= STEP_SHARE}


def main(arguments: list[str]) -> int:
    Arguments("kernels", __doc__).parse_args(arguments)
    device = torch.device("cpu")
    ceilings = ceilings_of(device, torch.float32, torch.bfloat16)
    rows = []
    for case in cpu_cases(device):
        rows.append(measure(case, device, ceilings))
        print(text_table("kernels", rows[-1:]), flush=True)
    about = {"bench": "kernels", "device": name_of(device), "triton": version_of("triton"), **ceilings}
    write("kernels", [about | row for row in rows])
    return ended("kernels", rows)
