"""The path of CUDA graphs through the engine, on a CPU: a stand-in for the graph runs the step again at each replay.

What only a GPU shows (capture itself, memory of the driver) is in tests/gpu/test_engine_gpu.py.
"""

import gc
import threading
import types
import weakref
from contextlib import nullcontext

import pytest
import torch

from rlhf_spmd.model import kv_attention
from rlhf_spmd.runtime.generation import cuda_graphs, kv_cache
from rlhf_spmd.runtime.generation.engine import Engine
from rlhf_spmd.runtime.generation.kv_cache import KVCache
from rlhf_spmd.runtime.generation.requests import Sampling
from rlhf_spmd.runtime.world.scratch import Scratch
from tests.unit.runtime.generation.test_engine import MAX_NEW, draws, make_engine, run
from tests.unit.runtime.generation.test_rollout import make_model, make_prompts, rows

SETTINGS = {
    "a block each": {"max_sequences": 8, "block_size": 30},
    "blocks of 1": {"max_sequences": 5, "block_size": 1},
    "blocks of 4": {"max_sequences": 12, "block_size": 4},
    "preempting": {"max_sequences": 8, "block_size": 2, "num_blocks": 20},
}


class StandIn:
    """Reads and writes the same memory at each replay, as a CUDA graph, and like one keeps no Python object alive but
    the tensors of that memory, and not those of the weights or of the cache. What it runs is the step of the engine
    that asks."""

    replays = captures = 0
    step: weakref.WeakMethod

    def __init__(self, inputs: tuple[torch.Tensor, ...]):
        type(self).captures += 1
        self.inputs, self.addresses, self.hidden_BD = inputs, self.addresses_now(), self.step()(*inputs)

    def addresses_now(self) -> list[int]:
        decoder = self.step().__self__
        stored = decoder.cache.keys_LnKsd, decoder.cache.values_LnKsd
        return [x.data_ptr() for x in (*decoder.model.parameters(), *stored)]

    def replay(self) -> None:
        type(self).replays += 1
        assert self.addresses == self.addresses_now(), "the graph reads memory that is gone"
        self.hidden_BD.copy_(self.step()(*self.inputs))


@pytest.fixture
def captured(monkeypatch):
    def capture(self, step, size):
        graph = StandIn((self._tokens_B[:size], self._cached_B[:size].fill_(-1), self.tables_BM[:size]))
        return graph, graph.hidden_BD

    def called(self, step, *rows):
        StandIn.step = weakref.WeakMethod(step)
        return call(self, step, *rows)

    call = cuda_graphs.Graphs.__call__
    monkeypatch.setattr(cuda_graphs, "can_capture", lambda model, device: True)
    monkeypatch.setattr(cuda_graphs.Graphs, "_capture", capture)
    monkeypatch.setattr(cuda_graphs.Graphs, "__call__", called)
    monkeypatch.setattr(kv_attention, "heads_of", lambda *_: None)  # a CPU's short cut, which knows no padding
    monkeypatch.setattr(StandIn, "replays", 0)
    monkeypatch.setattr(StandIn, "captures", 0)
    monkeypatch.setattr(cuda_graphs, "OCCURRENCES", 2)  # of these short responses


def responses(settings: dict) -> tuple[list, torch.Tensor, Engine]:
    engine = make_engine(make_model(), **settings)
    found, logprobs_RG = run(engine, make_prompts(19), draws(19), Sampling(MAX_NEW, min_new_tokens=2))
    return found, logprobs_RG, engine


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_tokens_with_graphs_are_those_without(settings, request):
    expected, expected_RG, _ = responses(settings)
    request.getfixturevalue("captured")
    found, found_RG, engine = responses(settings)
    assert StandIn.replays > MAX_NEW / 2
    assert found == expected
    torch.testing.assert_close(found_RG, expected_RG, atol=3e-5, rtol=0)
    assert (engine.num_preempted > 0) == ("num_blocks" in settings)


def test_prompts_have_a_pass_of_their_own(captured, monkeypatch):
    """The rows that run replay their graph in the round in which others begin."""
    monkeypatch.setattr(cuda_graphs, "OCCURRENCES", 0)
    model = make_model()
    engine = make_engine(model, max_sequences=5, block_size=4)
    whole, prepare, eager, found = engine.decoder.round, engine.decoder._prepared, [], []

    def noted(tokens_B, cached_B, prompts, *others):
        before, eager[:] = StandIn.replays, []
        hidden_BD = whole(tokens_B, cached_B, prompts, *others)
        found.append((len(tokens_B), len(prompts), StandIn.replays - before, [*eager]))
        return hidden_BD

    def prepared(tokens_B, *others):
        eager.append(len(tokens_B))
        return prepare(tokens_B, *others)

    monkeypatch.setattr(engine.decoder, "round", noted)
    monkeypatch.setattr(engine.decoder, "_prepared", prepared)
    run(engine, make_prompts(19), draws(19), Sampling(MAX_NEW, min_new_tokens=2))
    assert all(replays == (num_rows > 0) for num_rows, _, replays, _ in found)
    assert all(eager == [0] * (num_prompts > 0) for _, num_prompts, _, eager in found)
    assert sum(num_rows > 0 and num_prompts > 0 for num_rows, num_prompts, *_ in found) > 3


def test_the_cache_is_freed_with_its_engine(captured):
    """Without the cyclic collector: until it comes around, training would lack the memory."""
    gc.collect()
    gc.disable()
    try:
        engine = responses(SETTINGS["blocks of 4"])[2]
        held = [weakref.ref(x) for x in (engine.cache, engine.cache.keys_LnKsd, engine.decoder, engine.decoder._graphs)]
        assert StandIn.replays and all(ref() is not None for ref in held)
        del engine
        assert [ref() for ref in held] == [None] * len(held)
    finally:
        gc.enable()


def test_graphs_end_with_the_weights_that_they_read(captured):
    """ZeRO 3 gathers those of a frozen model for each mini-batch, while the engine of all of them lives on."""
    expected, _, engine = responses(SETTINGS["blocks of 4"])
    numbers = engine.submit(make_prompts(19), draws(19), Sampling(MAX_NEW, min_new_tokens=2))
    weights, graphs = list(engine.model.parameters()), engine.decoder._graphs
    captured_first, freed = dict(graphs._captured), []
    engine.run(numbers[:5])
    assert captured_first and captured_first.items() <= graphs._captured.items(), "they have not moved"
    for mini_batch in (numbers[5:12], numbers[12:]):
        for p in weights:
            freed.append(p.data)  # so that the new memory is other memory
            p.data = p.data.clone()
        engine.run(mini_batch)
    assert rows(engine.results(numbers)[0]) == expected


def of_iterations(model, num: int, monkeypatch, *, moves: bool) -> list[int]:
    """Returns how many graphs each iteration captures, whose engine has a cache of its own, where the one before lay or
    elsewhere."""
    make, places, captures = KVCache.__init__, [], []

    def placed(cache, *arguments) -> None:
        make(cache, *arguments)
        places.append((cache.keys_LnKsd, cache.values_LnKsd))
        cache.keys_LnKsd, cache.values_LnKsd = places[-1 if moves else 0]

    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "__init__", placed)
        for _ in range(num):
            before = StandIn.captures
            engine = make_engine(model, max_sequences=12, block_size=4, num_steps=0)
            found, _ = run(engine, make_prompts(25), draws(25), Sampling(MAX_NEW, min_new_tokens=2))
            captures.append(StandIn.captures - before)
            assert found == of_iterations.expected
            del engine
    return captures


def test_graphs_outlive_their_engine(request, monkeypatch):
    """And serve the next one, if its cache lies where theirs lay."""
    of_iterations.expected, _ = run(
        make_engine(make_model(), max_sequences=12), make_prompts(25), draws(25), Sampling(MAX_NEW, min_new_tokens=2)
    )
    request.getfixturevalue("captured")
    first, second, *later = of_iterations(make_model(), 4, monkeypatch, moves=False)
    assert first + second == 2 and later == [0, 0], "one graph of 8 rows, one of 16"
    model = make_model()
    assert min(of_iterations(model, 3, monkeypatch, moves=True)) > 0
    assert len(cuda_graphs._KEPT[model]) == cuda_graphs.KEPT < 3
    kept = weakref.ref(next(iter(cuda_graphs._KEPT[model].values())))
    del model
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize(("num_gradients", "last"), [(10**6, True), (100, False)], ids=["larger", "smaller"])
def test_graphs_outlive_training_where_the_cache_has_the_memory_of_gradients(
    num_gradients, last, captured, monkeypatch
):
    """A cache that needs more than the gradients has memory of its own, where graphs end with it."""
    memory = Scratch(torch.device("cpu"), lasts=True)
    taken = memory.take  # a CPU needs zeros
    cleared = types.SimpleNamespace(take=lambda *of, **how: taken(*of, **how).zero_(), release=memory.release)
    monkeypatch.setattr(kv_cache, "scratch", lambda device: cleared)
    model, captures, found, kept = make_model(), [], [], []
    for _ in range(4):
        before = StandIn.captures
        engine = make_engine(model, max_sequences=12, block_size=4, num_steps=0)
        found.append(run(engine, make_prompts(25), draws(25), Sampling(MAX_NEW, min_new_tokens=2))[0])
        captures.append(StandIn.captures - before)
        kept.append(engine.cache._memory[:0].clone() if last else engine.cache._memory)  # another may not lie there
        del engine
        for num in (num_gradients, num_gradients // 2):  # an actor's step, a critic's
            memory.take(4 * num, is_cache=False).view(torch.float32).fill_(1.0)
        kv_cache.release_unused(torch.device("cpu"))
        assert (memory.idle_bytes > 0) == last
    assert all(one == found[0] for one in found)
    assert (captures[2:] == [0, 0]) == last and captures[0] > 0


def test_the_ranks_of_a_copy_keep_the_graphs_of_the_same_engine(monkeypatch):
    """Also where the cache of one lies where it lay, and that of another moves to and fro: else they would run
    different numbers of all-reduces."""
    meets, told, found = threading.Barrier(2), [0, 0], [[], []]

    def least(rank: int, number: int) -> int:
        told[rank] = number
        meets.wait(30)
        result = min(told)
        meets.wait(30)
        return result

    monkeypatch.setattr(cuda_graphs, "smallest", lambda number, *_: least(int(threading.current_thread().name), number))
    places = torch.zeros(3, 1)

    def of_rank(rank: int, order: list[int]) -> None:
        model = make_model()
        for engine, place in enumerate(order):
            cache = types.SimpleNamespace(keys_LnKsd=places[place], values_LnKsd=places[place])
            graphs = cuda_graphs.graphs_of(model, cache, (1, 1))
            graphs.keep_for(model, types.SimpleNamespace(forwards={}))
            found[rank].append(dict(graphs._captured))
            graphs._captured.setdefault(8, engine)

    orders = [0, 0, 0, 0, 0], [1, 2, 1, 1, 1]
    threads = [threading.Thread(target=of_rank, args=one, name=str(one[0])) for one in enumerate(orders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[0] == found[1] == [{}, {}, {}, {8: 2}, {8: 2}]


def test_engines_that_live_at_the_same_time_share_no_graph(request):
    expected, _, _ = responses({"max_sequences": 19})
    request.getfixturevalue("captured")
    model, settings = make_model(), SETTINGS["blocks of 4"] | {"num_steps": 0}
    engines = [make_engine(model, **settings) for _ in range(2)]
    numbers = [engine.submit(make_prompts(19), draws(19), Sampling(MAX_NEW, min_new_tokens=2)) for engine in engines]
    for mini_batch in (slice(0, 5), slice(5, 19)):  # in turn
        for engine, requests in zip(engines, numbers, strict=True):
            engine.run(requests[mini_batch])
    found = [rows(engine.results(requests)[0]) for engine, requests in zip(engines, numbers, strict=True)]
    assert found[0] == found[1] == expected and StandIn.replays > MAX_NEW


class Graph:
    """Captures nothing; its end fails."""

    def capture_begin(self, **_) -> None:
        pass

    def capture_end(self) -> None:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


@pytest.fixture
def graphs(monkeypatch) -> cuda_graphs.Graphs:
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(cuda_graphs, "_side_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(cuda_graphs, "OCCURRENCES", 0)
    return cuda_graphs.Graphs(3, 1, torch.device("cpu"))


def test_nothing_is_collected_during_a_capture(graphs):
    """A graph that lies in a cycle of objects would be destroyed in the middle of it, which CUDA does not permit."""

    def step(*_) -> torch.Tensor:
        enabled.append(gc.isenabled())
        return torch.zeros(8, 1)

    for before in (True, False):
        enabled: list[bool] = []
        (gc.enable if before else gc.disable)()
        try:
            with pytest.raises(RuntimeError, match="during capture"):
                graphs(step, torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64))
            assert enabled == [before, False] and gc.isenabled() == before
        finally:
            gc.enable()
