"""The step of `python -m bench first-light` that looks into thirty decode rounds: pauses, synchronisations, capture."""

import gc
import statistics
import time
from collections.abc import Sequence

import torch

from bench.first_light.speed import DRY, LLAMA_7B, bits_of, random_model
from bench.first_light.steps import Found, Light
from bench.speed.roofline import alternate
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.generation.cuda_graphs import graph_size
from rlhf_spmd.runtime.generation.engine import Engine
from rlhf_spmd.runtime.generation.requests import Sampling

BUSY_SHARE = 0.90  # of the time of a decode round: its graph, without the profiler, which makes each kernel later
SYNCHRONISATIONS = 1.1  # of a decode round; the profiler's own end adds one to thirty rounds
REPLAYS = 9  # of a graph, timed
PROFILED, SETTLED = 30, 12  # rounds; and those before, in which prompts are computed and graphs captured
DRY_PROFILED = 3


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
    engine.submit(prompts, bits_of(rows, longest), Sampling(longest))
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
