"""The generation engine on a GPU: tokens with CUDA graphs, weights that move, memory after generation, waits for the
device, its clock.

What these tests compare with runs on the CPU as well, so that they are known to run where there is no GPU.
"""

import gc
import subprocess
import sys
import time
import warnings

import pytest
import torch

from rlhf_spmd.runtime.generation import cuda_graphs
from rlhf_spmd.runtime.generation.engine import Engine
from rlhf_spmd.runtime.generation.kv_cache import KVCache
from rlhf_spmd.runtime.generation.requests import Sampling
from rlhf_spmd.runtime.weights.frozen_weights import OffloadedCopy
from rlhf_spmd.runtime.world.trace import DeviceClock, Tracer
from tests.draws import random_responses
from tests.unit.runtime.generation.test_rollout import OFTEN, make_model, make_prompts, rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LONGEST, MAX_NEW = 9 + 48, 48


def responses(num: int, *, eos_ids=OFTEN, sampling: Sampling | None = None, **settings) -> tuple[list, Engine]:
    engine = Engine(make_model().to(DEVICE), longest=LONGEST, eos_ids=eos_ids, **settings)
    numbers = engine.submit(make_prompts(num), random_responses(num, MAX_NEW), sampling or Sampling(MAX_NEW))
    engine.run()
    return rows(engine.results(numbers)[0].cpu()), engine


@pytest.mark.parametrize(
    "settings", [{}, {"max_sequences": 5}, {"num_blocks": 100, "eos_ids": ()}], ids=["roomy", "few", "preempting"]
)
def test_tokens_with_graphs_are_those_without(settings, monkeypatch):
    settings = {"max_sequences": 64, "block_size": 16} | settings
    found, engine = responses(64, **settings)
    assert (engine.num_preempted > 0) == ("num_blocks" in settings)
    assert bool(engine.decoder._graphs) == (DEVICE == "cuda")
    monkeypatch.setattr(cuda_graphs, "can_capture", lambda model, device: False)
    expected, engine = responses(64, **settings)
    assert engine.decoder._graphs is None
    assert found == expected


def test_weights_may_move_between_mini_batches():
    """As those of a frozen model that ZeRO 3 gathers for each: graphs of the weights before would read numbers that are
    gone."""
    expected, engine = responses(64, max_sequences=16)
    numbers = engine.submit(make_prompts(64), random_responses(64, MAX_NEW), Sampling(MAX_NEW))
    for mini_batch in (numbers[:32], numbers[32:]):
        for p in engine.model.parameters():
            gone, p.data = p.data, p.data.clone()
            gone.fill_(torch.nan)
        engine.run(mini_batch)
    assert rows(engine.results(numbers)[0].cpu()) == expected


def test_what_a_cache_held_before_changes_no_token(monkeypatch):
    """On a GPU it is not cleared."""
    expected, _ = responses(64, max_sequences=16, block_size=16)
    make = KVCache.__init__

    def filled(cache: KVCache, *arguments) -> None:
        make(cache, *arguments)
        for stored in (cache.keys_LnKsd, cache.values_LnKsd) if DEVICE == "cuda" else ():
            stored.fill_(torch.nan)

    monkeypatch.setattr(KVCache, "__init__", filled)
    assert responses(64, max_sequences=16, block_size=16)[0] == expected


def test_offloaded_weights_come_back():
    model = make_model().to(DEVICE)
    expected = [p.detach().clone() for p in model.parameters()]
    copy = OffloadedCopy(model)
    assert all(p.numel() == 0 for p in model.parameters())
    assert {weight.is_pinned() for weight in copy.host} == {DEVICE == "cuda"}
    copy.load()
    assert all(torch.equal(p, weight) for p, weight in zip(model.parameters(), expected, strict=True))


@on_gpu
def test_memory_is_free_when_the_engine_has_gone():
    """Without the cyclic collector, and without giving anything back to the device."""
    responses(64)  # what is loaded once stays
    gc.collect()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        _, engine = responses(64, max_sequences=64)
        assert torch.cuda.memory_allocated() > before
        del engine
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


@on_gpu
def test_a_decode_step_waits_for_the_device_once():
    """The tokens must be looked at to know which rows have ended; nothing else needs the host."""
    waits: list[int] = []
    engine = Engine(make_model().to(DEVICE), longest=LONGEST, max_sequences=8)
    engine.submit(make_prompts(8), random_responses(8, MAX_NEW), Sampling(MAX_NEW))
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.run(progress=lambda *_: waits.append(len(caught)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    each = [after - before for before, after in zip(waits[3:-2], waits[4:-1], strict=True)]
    assert each and max(each) <= 1, each


@on_gpu
def test_marks_tell_when_the_device_worked():
    """A span holds the seconds of its own kernels, not those of what was asked for before."""
    recorder = Tracer(clock=DeviceClock(torch.device("cuda", torch.cuda.current_device())))
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(2):  # the first time loads the library
        began = time.perf_counter()
        with recorder.span("long"):
            for _ in range(40):
                x @ x
        with recorder.span("short"):
            x @ x
        asked_s = time.perf_counter() - began
        recorder.read_marks()
    long, short = list(recorder.spans)[-2:]
    long_s, short_s = (span[3] - span[2] for span in (long, short))
    assert 5 * short_s < long_s and asked_s < long_s
    assert long[3] <= short[2] + 1e-6
    assert abs(short[3] - time.perf_counter()) < 1.0


@on_gpu
def test_a_rank_that_waits_for_its_device_sleeps():
    """In a process of its own: how to wait is decided before CUDA starts."""
    code = """
import time, torch
from rlhf_spmd.runtime.world.devices import sleep_while_waiting
assert sleep_while_waiting(0)
torch.cuda.set_device(0)
x = torch.ones(1, device="cuda")
torch.cuda._sleep(10**6), torch.cuda.synchronize()
wall, used = time.perf_counter(), time.process_time()
torch.cuda._sleep(3 * 10**9)
x.tolist()
wall, used = time.perf_counter() - wall, time.process_time() - used
assert wall > 0.5 and used < 0.2 * wall, (wall, used)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
