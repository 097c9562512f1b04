"""The steps of `python -m bench first-light` that ask how fast the engine generates, what thirty decode rounds wait for
(pauses, synchronisations, capture), and whether something grows in twenty iterations of generation and training: after
the first two of them no kernel may be compiled or loaded, and no memory reserved."""

# R requests, P prompt tokens, G response tokens

import gc
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bench.first_light.speed import DRY, LLAMA_1B, beside, gigabytes, measured_ceilings, passes_of, random_model
from bench.first_light.steps import Found, Light, Missing
from bench.forecast import derived
from bench.forecast.derived import LLAMA_7B
from bench.speed.requests import spread, submit, to_the_limit
from bench.speed.roofline import alternate, precision_of, products_of
from bench.tables import text_table
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.workload import ModelShape
from rlhf_spmd.runtime.engines.flat_engine import Groups
from rlhf_spmd.runtime.engines.train_engine import EngineOptions, make_engine
from rlhf_spmd.runtime.generation import kv_cache
from rlhf_spmd.runtime.generation.cuda_graphs import OCCURRENCES, graph_size
from rlhf_spmd.runtime.generation.engine import Engine
from rlhf_spmd.runtime.generation.kv_cache import token_bytes

# a decode step
ROWS, CONTEXT, STEPS = 64, 1024, 48
STEP_SHARE = 0.70  # promised share of the memory bandwidth
LEAST = 4.0  # promised times faster than the faster of transformers' ways
# requests of nano-vllm
QWEN3_06B = ModelShape(28, 1024, 3072, 16, 8, 128, 151936, tied=True, qk_norm=True)
CACHE_SHARE = 0.85  # of the free memory
# decode rounds
BUSY_SHARE = 0.90  # of the time of a decode round: its graph, without the profiler, which makes each kernel later
SYNCHRONISATIONS = 1.1  # of a decode round; the profiler's own end adds one to thirty rounds
REPLAYS = 9  # of a graph, timed
PROFILED, SETTLED = 30, 12  # rounds; and those before, in which prompts are computed and graphs captured
DRY_PROFILED = 3
# growth
ITERATIONS, WARM = 20, 2
MOST_ROWS, MOST_LENGTH = 64, 256  # of the first iteration: responses, and tokens of a prompt or a response at most
GROWTH = 2**26  # bytes that may be reserved after the warm-up: less than the workspace of one stream more


# ---- decoding --------------------------------------------------------------------------------------------------------


def decode(light: Light) -> Found:
    """Measures decoding inside the engine: from one round to the next, with scheduling and sampling."""
    from bench.speed import generate_peers as peers

    device = light.device
    shape, rows, context = (DRY, 3, 40) if light.dry else (LLAMA_7B, ROWS, CONTEXT)
    theirs = peers.random_model(shape, torch.bfloat16, device)
    mine = peers.same_weights(theirs, torch.bfloat16)
    ceilings = measured_ceilings(device)
    should, words = beside(light, lambda gpu: derived.decode(gpu, shape, rows, context))
    row = light.row(**decode_step(mine, ceilings, rows=rows, context=context) | ceilings | should)
    told = f"{1e3 * row['step_s']:.2f} ms{words}, {row['share_of_memory']:.0%} of {gigabytes(ceilings)} GB/s"
    return Found(light.dry or row["share_of_memory"] >= STEP_SHARE, told)


def decode_step(mine: Transformer, ceilings: dict, *, rows: int, context: int) -> dict:
    """Measures the row of a decode step inside the engine: the time from one round to the next, scheduling and sampling
    included, once every prompt is in the cache."""
    prompt = context - STEPS // 2
    work = to_the_limit(mine.config.vocab_size, num=rows, new=STEPS, prompt=prompt)
    engine = Engine(mine, longest=work.longest, max_sequences=rows)
    submit(engine, work.prompts_RP.tolist(), work.lengths)
    rounds: list[tuple[float, int]] = []
    engine.run(progress=lambda _, num: rounds.append((time.perf_counter(), num)))  # the device is a round ahead
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


# ---- whole generations -----------------------------------------------------------------------------------------------


def generate(light: Light) -> Found:
    return against_transformers(light, {"transformers": {}})


def generate_static(light: Light) -> Found:
    """Measures `generate` with a static cache, apart, because compiling may take minutes."""
    if light.dry:
        raise Missing("a compiler of transformers' static cache, which a dry run leaves out")
    return against_transformers(light, {"transformers, static cache": {"cache_implementation": "static"}})


def against_transformers(light: Light, options: Mapping[str, dict]) -> Found:
    """Compares with transformers: responses of realistic lengths, which are judged, then some that all run to the
    limit."""
    from bench.speed import generate_peers as peers

    shape = DRY if light.dry else LLAMA_7B
    theirs = peers.without_ends(peers.random_model(shape, torch.bfloat16, light.device))
    mine, vocab = peers.same_weights(theirs, torch.bfloat16), shape.vocab_size
    places, limit, new = (2, 5, 4) if light.dry else (ROWS, 256, 128)
    works = {LEAST: spread(vocab, num=4 * places, places=places, limit=limit)}
    works[1.0] = to_the_limit(vocab, num=places, new=new)
    told, ok = [], True
    for promised, work in works.items():
        row = peers.compare(work, theirs, mine, repeats=1, options=options)
        row |= {"model": "Llama 7B shape", "promised": promised, "ok": row["ratio"] >= promised}
        print(text_table("generate", [light.row(**row)]), flush=True)
        gc.collect()
        ok &= row["ok"]
        told.append(f"{work.name}: {row['ours_tokens_per_s']:,.0f} tokens/s, {row['ratio']:.1f} times")
    return Found(light.dry or ok, "; ".join(told))


def nano_vllm_requests(num: int, least: int, most: int) -> tuple[list[list[int]], list[int]]:
    """Returns prompts and lengths of responses as nano-vllm's bench.py draws them; with 256, 100 and 1,024 these are
    142,827 and 133,966 tokens."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(least, most))] for _ in range(num)]
    return prompts, [rng.randint(least, most) for _ in range(num)]


def nano_vllm(light: Light) -> Found:
    """Compares with nano-vllm; graphs are captured before the clock starts, as there."""
    num, least, most = (5, 2, 6) if light.dry else (256, 100, 1024)
    model = random_model(DRY if light.dry else QWEN3_06B, light.device)
    prompts, lengths = nano_vllm_requests(num, least, most)
    prompts = [[token % model.config.vocab_size for token in prompt] for prompt in prompts]
    free_bytes = CACHE_SHARE * kv_cache.free_bytes(light.device, 1)
    engine = Engine(model, longest=2 * most, max_sequences=num, free_bytes=free_bytes)

    def run(prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> tuple[float, Tensor]:
        """Runs requests. Returns seconds, and the number of tokens of each response."""
        started = time.perf_counter()
        numbers = submit(engine, prompts, lengths, temperature=0.6)
        engine.run()
        lengths_R = (engine.results(numbers)[0] >= 0).sum(1).cpu()
        return time.perf_counter() - started, lengths_R

    warm = min(20, most)
    run([[1 + i % 7, 2] for i in range(num)], [1 + warm * i // num for i in range(num)])  # fewer and fewer rows
    seconds, lengths_R = run(prompts, lengths)
    tokens = int(lengths_R.sum())
    row = light.row(
        work=f"{num} sequences, in and out {least}-{most}",
        model="Qwen3-0.6B shape",
        dtype="bfloat16",
        prompt_tokens=sum(map(len, prompts)),
        tokens=tokens,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        num_preempted=engine.num_preempted,
    )
    told = f"{tokens:,} tokens in {seconds:.1f} s: {row['tokens_per_s']:,.0f} tokens/s"
    return Found(lengths_R.tolist() == lengths, told + f", {engine.num_preempted} preempted")


# ---- decode rounds ---------------------------------------------------------------------------------------------------


def decode_profile(light: Light) -> Found:
    model = random_model(DRY if light.dry else LLAMA_7B, light.device)
    told, ok = [], True
    for rows in (2, 3) if light.dry else (64, 256):
        row = profiled(light, model, rows)
        ok &= row["synchronisations"] <= SYNCHRONISATIONS and (row["graph_s"] or 0) >= BUSY_SHARE * row["round_s"]
        busy = "no graph" if row["graph_s"] is None else f"{row['graph_s'] / row['round_s']:.0%} in the graph"
        busy += "" if row["busy_share"] is None else f", {row['busy_share']:.0%} computing under the profiler"
        times = f"{1e3 * row['round_s']:.2f} ms, {row['synchronisations']:.1f} synchronisations, {busy}"
        told.append(f"{rows} rows: {times}, gap {1e6 * (row['gap_s'] or 0):.0f} us, capture {row['capture_s']:.2f} s")
        gc.collect()
    return Found(light.dry or ok, "; ".join(told))


def profiled(light: Light, model: Transformer, rows: int) -> dict:
    """Profiles some rounds and returns their row. A trace for chrome://tracing or ui.perfetto.dev is left in the
    folder."""
    from torch.profiler import ProfilerActivity, profile

    num = DRY_PROFILED if light.dry else PROFILED
    prompt, longest = 16, SETTLED + num + 8
    activities = [ProfilerActivity.CPU, *([] if light.dry else [ProfilerActivity.CUDA])]
    engine, profiler = Engine(model, longest=prompt + longest, max_sequences=rows), profile(activities=activities)
    prompts = [[1 + (7 * i + j) % 250 for j in range(prompt)] for i in range(rows)]
    submit(engine, prompts, [longest] * rows)
    ends: list[float] = []

    def note(num_ended: int, num_tokens: int) -> None:
        ends.append(time.perf_counter())
        if len(ends) == SETTLED:
            profiler.start()
        if len(ends) == SETTLED + num:
            profiler.stop()

    engine.run(progress=note)
    rounds = [later - one for one, later in zip(ends, ends[1:], strict=False)]
    usual_s = statistics.median(rounds[-6:-1])  # without the profiler
    for column in ("self_cpu_time_total", *(() if light.dry else ("self_device_time_total",))):
        print(f"--- {rows} rows\n{profiler.key_averages().table(sort_by=column, row_limit=20)}", flush=True)
    profiler.export_chrome_trace(str(light.out / f"decode-{rows}-rows.json.gz"))
    events = profiler.events()
    on_device = [event.time_range for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    waits = "Synchronize" if not light.dry else "aten::_local_scalar_dense"
    num_waits = sum(waits in event.name for event in events if event.device_type == torch.autograd.DeviceType.CPU)
    busy_share, gap_s = timeline([(1e-6 * one.start, 1e-6 * one.end) for one in on_device], num)
    return light.row(
        work=f"{num} decode rounds, {rows} rows",
        round_s=usual_s,
        graph_s=graph_s(engine, rows),
        busy_share=busy_share,
        gap_s=gap_s,
        synchronisations=num_waits / num,
        operations_on_device=len(on_device) / num,
        capture_s=max(max(rounds[: SETTLED - 1]) - usual_s, 0.0),
    )


def graph_s(engine: Engine, rows: int) -> float | None:
    """Measures the seconds of the graph of so many rows alone, once more with its last inputs. None without graphs."""
    graphs = engine.decoder._graphs
    if graphs is None:
        return None
    graph, _ = graphs._captured[graph_size(rows)]
    return alternate({"graph": graph.replay}, graphs.tables_BM.device, rounds=REPLAYS)["graph"]


def timeline(intervals: Sequence[tuple[float, float]], rounds: int) -> tuple[float | None, float | None]:
    """Returns, from the intervals in which a device did something, the share of the time that they fill, and the median
    of the longest pauses, one for each round. None where nothing was seen."""
    if not intervals:
        return None, None
    busy_s, pauses, end = 0.0, [], None
    first = min(start for start, _ in intervals)
    for start, stop in sorted(intervals):
        if end is not None and start > end:
            pauses.append(start - end)
        busy_s += max(0.0, stop - max(start, first if end is None else end))
        end = stop if end is None else max(end, stop)
    longest = sorted(pauses, reverse=True)[:rounds]
    return busy_s / (end - first), statistics.median(longest) if longest else 0.0


# ---- growth ----------------------------------------------------------------------------------------------------------


def num_loaded() -> int:
    """Returns the variants of our Triton kernels that this process has compiled or loaded; 0 where they are
    interpreted."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("rlhf_spmd.kernels")]
    kernels = {id(one): one for module in modules for one in vars(module).values() if hasattr(one, "device_caches")}
    return sum(len(caches[0]) for kernel in kernels.values() for caches in kernel.device_caches.values())


def sizes(number: int, rows: int, length: int) -> tuple[int, int]:
    """Returns rows and length of an iteration, from those of the first one, which is the largest."""
    return max(1, rows - 5 * number % rows), max(1, length - 11 * number % length)


def generate_some(model: Transformer, rows: int, length: int, longest: int, places: int) -> None:
    """Generates responses of some rows in a fresh engine, some of which wait for a place; lengths differ.

    longest: tokens of a sequence in any iteration. As in a run, all engines have the same: it decides in how many parts
        a row's attention is split, and each number of parts is a kernel.
    """
    engine = Engine(model.eval(), longest=longest, max_sequences=places)
    prompts = [[1 + (7 * i + j) % 250 for j in range(1 + (5 * i) % length)] for i in range(rows)]
    submit(engine, prompts, [1 + (3 * i) % length for i in range(rows)])
    engine.run()


def steady(light: Light) -> Found:
    """Checks that memory stays steady: the first iteration is the largest; every later one has sizes of its own."""
    most, longest, num = (4, 4, 3) if light.dry else (MOST_ROWS, MOST_LENGTH, ITERATIONS)
    model = random_model(DRY if light.dry else LLAMA_1B, light.device)
    engine = make_engine(model, groups=Groups(), options=EngineOptions(0, torch.bfloat16))
    loaded, reserved, seconds = [], [], []
    for number in range(num):
        started = time.perf_counter()
        rows, length = sizes(number, most, longest)
        generate_some(model, rows, length, 2 * longest, max(1, most // 2))
        passes_of(model.train(), engine, max(1, rows // 8), length, length)()
        engine.update(lr=1e-6)
        gc.collect()
        loaded.append(num_loaded())
        reserved.append(0 if light.dry else torch.cuda.memory_reserved(light.device))
        seconds.append(time.perf_counter() - started)
    late, grown = loaded[-1] - loaded[WARM - 1], max(reserved[WARM:]) - max(reserved[:WARM])
    light.row(iterations=num, kernels_loaded=loaded, reserved_bytes=reserved, seconds=seconds)
    told = f"{late} variants of kernels loaded after the warm-up, {grown / 2**20:+,.0f} MiB reserved"
    return Found(late == 0 and grown <= GROWTH, told)
