"""How much faster than transformers' `generate` is ours, and how near to what the device can do?

The same weights at the same precision take turns in one run, 32 sequences at a time: (a) every response runs to the
limit; (b) responses of realistic lengths, where ours refills the places of those that have ended and a batch of
transformers lasts until its longest has. Only tokens of responses count. Shares are of the floor of a decode step by
the memory bandwidth and the rate of matrix products that the run itself measures. On a CPU: a random Llama of 28 M
parameters, and with --smollm2 SmolLM2-135M instead. On a GPU: the decode step of a model of 7B shape, and whole
generations with it, also against transformers' static cache (compiled).

Cost: five minutes on two cores, twenty with --smollm2, one with --quick (which judges and writes nothing), a quarter of
one with --ours (only our generation, on one thread: work of which `bench unchanged` measures the processor time); on a
GPU about five minutes and 60 GiB. On a CPU --precision and --work measure a part of it, and leave the rows of the rest.
Command: python -m bench generate [--smollm2] [--quick | --ours] [--precision float32|bfloat16] [--work limit|spread]
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler prints when it starts; read as torch is imported
import torch

from bench import generate_peers as peers
from bench.generate_costs import breakdown, floor
from bench.roofline import matrix_ceiling, memory_ceiling, name_of
from bench.rows import REPOSITORY, RESULTS, write
from rlhf_spmd.model.transformer import Transformer

SMOLLM2 = REPOSITORY / ".cache" / "smollm2-135m"
PLACES = 32
THREADS = 2
REPEATS = 3
LEAST = {"limit": 1.5, "spread": 2.5}  # promised ratios on a CPU
DTYPES = (torch.float32, torch.bfloat16)
LOOK = 32  # tokens of the run that is looked into


def take_turns(calls: Mapping[str, Callable[[], int]], repeats: int) -> dict[str, tuple[float, float]]:
    """Median seconds of each call, and the tokens it says it made; one after the other, so that a slow moment of the
    machine falls on all alike. The order changes with each round."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    tokens: dict[str, int] = {}
    for number in range(repeats):
        for name in list(calls)[:: 1 if number % 2 == 0 else -1]:
            started = time.perf_counter()
            tokens[name] = calls[name]()
            seconds[name].append(time.perf_counter() - started)
    return {name: (statistics.median(found), tokens[name]) for name, found in seconds.items()}


def compare(work: peers.Workload, theirs, mine: Transformer, *, repeats: int, options: Mapping[str, dict]) -> dict:
    """The row of one workload. options: of transformers' `generate`, for each way to call it."""
    calls = {"ours": lambda: peers.by_ours(mine, work)}
    calls |= {name: lambda more=more: peers.by_transformers(theirs, work, **more) for name, more in options.items()}
    brief = peers.shortened(work, 2)
    peers.by_ours(mine, brief)
    for more in options.values():
        peers.by_transformers(theirs, work if more else brief, **more)  # a static cache compiles for its own length
    found = take_turns(calls, repeats)
    ours_s, tokens = found.pop("ours")
    assert tokens == work.num_tokens and all(count == tokens for _, count in found.values()), (work.name, tokens)
    return {
        "dtype": _name(mine.dtype),
        "work": work.name,
        "requests": len(work.lengths),
        "places": work.places,
        "tokens": tokens,
        "mean_length": tokens / len(work.lengths),
        "ours_s": ours_s,
        "ours_tokens_per_s": tokens / ours_s,
        "peers_s": {name: taken_s for name, (taken_s, _) in found.items()},
        "peers_tokens_per_s": {name: tokens / taken_s for name, (taken_s, _) in found.items()},
        "ratio": min(taken_s for taken_s, _ in found.values()) / ours_s,
    }


def look_inside(row: dict, work: peers.Workload, mine: Transformer, ceilings: dict) -> dict:
    """A row of responses that all run to the limit, with its floor and where the time of a step goes."""
    steps = work.lengths[0]
    context = work.prompts_RP.shape[1] + steps / 2
    costs = floor(mine, work.places, context, ceilings)
    brief = peers.shortened(work, LOOK)
    peers.by_ours(mine, brief)
    wall_s = statistics.median(_seconds(lambda: peers.by_ours(mine, brief)) for _ in range(3))
    step_s = row["ours_s"] / steps
    parts = breakdown(lambda: peers.by_ours(mine, brief), wall_s)
    return row | costs | {"step_s": step_s, "share_of_floor": costs["floor_s"] / step_s, "parts": parts}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def show(row: dict) -> None:
    theirs = ", ".join(f"{name} {rate:,.0f}" for name, rate in row["peers_tokens_per_s"].items())
    verdict = "" if row["ok"] else f"  BELOW {row['promised']:g}"
    print(
        f"{row['model']}, {row['dtype']}, {row['requests']} requests, {row['work']}: "
        f"{row['ours_tokens_per_s']:,.0f} tokens/s, {theirs}: {row['ratio']:.2f}x{verdict}",
        flush=True,
    )
    if "step_s" in row:
        floors = f"memory {1e3 * row['memory_s']:.1f}, products {1e3 * row['matrix_s']:.1f}"
        print(
            f"  a decode step takes {1e3 * row['step_s']:.1f} ms; its floor ({floors} ms) is "
            f"{row['share_of_floor']:.0%} of that; its products alone take {1e3 * row['products_s']:.1f} ms"
        )
        print("  " + ", ".join(f"{name} {share:.0%}" for name, share in row["parts"].items()), flush=True)


def measure_ceilings(device: torch.device) -> dict:
    matrix = {_name(dtype): matrix_ceiling(device, dtype) for dtype in DTYPES}
    ceilings = {"memory_bytes_per_s": memory_ceiling(device), "matrix_flops_per_s": matrix}
    rates = ", ".join(f"{name} {flops / 1e12:.2f} TFLOP/s" for name, flops in matrix.items())
    print(f"{name_of(device)}: memory {ceilings['memory_bytes_per_s'] / 1e9:.1f} GB/s, products {rates}", flush=True)
    return ceilings


def on_cpu(
    folder: Path | None, ceilings: dict, *, quick: bool, precision: str | None = None, only: str | None = None
) -> list[dict]:
    """Rows of the small model, or of the one in a folder; of one precision and kind of work only, if given."""
    device, rows = torch.device("cpu"), []
    repeats = 1 if quick else REPEATS
    limit, num = (128, 64) if quick else (256, 128)
    for dtype in (dtype for dtype in DTYPES if precision in (None, _name(dtype))):
        if folder is None:
            theirs = peers.random_model(peers.SMALL, dtype, device)
        else:
            theirs = peers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        theirs = peers.without_ends(theirs)
        mine, vocab_size = peers.same_weights(theirs, dtype), theirs.config.vocab_size
        works = {
            "limit": peers.to_the_limit(vocab_size, num=PLACES, new=limit),
            "spread": peers.spread(vocab_size, num=num, places=PLACES, limit=limit),
        }
        for kind, work in ((kind, work) for kind, work in works.items() if only in (None, kind)):
            row = compare(work, theirs, mine, repeats=repeats, options={"transformers": {}})
            row |= {"model": "SmolLM2-135M" if folder else "Llama 28 M", "promised": LEAST[kind]}
            row["ok"] = row["ratio"] >= row["promised"]
            if kind == "limit":
                row = look_inside(row, work, mine, ceilings)
            show(row)
            rows.append(row)
    return rows


def ours_only() -> None:
    """Prints our tokens per second with the small model, without peers and ceilings."""
    for dtype in DTYPES:
        theirs = peers.without_ends(peers.random_model(peers.SMALL, dtype, torch.device("cpu")))
        mine, vocab_size = peers.same_weights(theirs, dtype), theirs.config.vocab_size
        for work in (
            peers.to_the_limit(vocab_size, num=PLACES, new=64),
            peers.spread(vocab_size, num=64, places=PLACES, limit=64),
        ):
            taken_s = _seconds(lambda work=work, mine=mine: peers.by_ours(mine, work))
            print(f"{_name(dtype)}, {work.name}: {work.num_tokens / taken_s:,.0f} tokens/s", flush=True)


def keep(rows: list[dict], name: str) -> None:
    """Writes these rows of NAME.jsonl in place of those of the same case; the others stay as they are."""

    def case(row: dict) -> tuple:
        return tuple(row.get(key) for key in ("model", "device", "dtype", "work"))

    path = RESULTS / f"{name}.jsonl"
    old = path.read_text().splitlines() if path.exists() else []
    places = {case(json.loads(line)): line for line in old}  # of rows, which keep their order
    new = write(name, rows).read_text().splitlines()
    places |= {case(json.loads(line)): line for line in new}
    path.write_text("".join(line + "\n" for line in places.values()))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench generate", description=__doc__)
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2-135M instead of the random model")
    parser.add_argument("--quick", action="store_true", help="once, and less of it; judges and writes nothing")
    parser.add_argument("--ours", action="store_true", help="only ours, on a CPU; judges and writes nothing")
    parser.add_argument("--precision", choices=[_name(dtype) for dtype in DTYPES], help="only this one, on a CPU")
    parser.add_argument("--work", choices=list(LEAST), help="only this kind of responses, on a CPU")
    parsed = parser.parse_args(arguments)
    if parsed.smollm2 and not (SMOLLM2 / "model.safetensors").is_file():
        parser.error(f"{SMOLLM2} is not there; `make .cache/smollm2-135m/model.safetensors` fetches and converts it")
    if parsed.ours:
        torch.set_num_threads(1)  # threads that wait for one another would count as work
        ours_only()
        print(json.dumps({"bench": "generate", "ok": True}))
        return 0
    if torch.cuda.is_available():
        from bench.generate_gpu import on_gpu

        device = torch.device("cuda", torch.cuda.current_device())
        rows = on_gpu(device, measure_ceilings(device), quick=parsed.quick)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(THREADS)
        ceilings = measure_ceilings(device)
        part = {"precision": parsed.precision, "only": parsed.work}
        rows = on_cpu(SMOLLM2 if parsed.smollm2 else None, ceilings, quick=parsed.quick, **part)
    ok = all(row["ok"] for row in rows) or parsed.quick
    if not parsed.quick:
        about = {"bench": "generate", "device": name_of(device), "transformers": version("transformers")}
        # the tables show the rows of a CPU; a decode step of a GPU has other columns
        keep([about | row for row in rows], "generate" if device.type == "cpu" else "generate_gpu")
    print(json.dumps({"bench": "generate", "device": name_of(device), "ok": ok}))
    return 0 if ok else 1
