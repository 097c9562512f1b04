"""The path of CUDA graphs through the engine, on a CPU: a stand-in for the graph runs the step again at each replay.

What only a GPU shows (capture itself, memory of the driver) is in tests/gpu/test_engine_gpu.py.
"""

import gc
import types
import weakref
from contextlib import nullcontext

import pytest
import torch

from rlhf_spmd.errors import UserError
from rlhf_spmd.model import kv_attention
from rlhf_spmd.runtime.generation import cuda_graphs
from rlhf_spmd.runtime.generation.engine import Engine
from rlhf_spmd.runtime.generation.requests import Sampling
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
    the tensors of that memory, and not those of the weights."""

    replays = 0

    def __init__(self, step, inputs: tuple[torch.Tensor, ...]):
        self.step, self.inputs = weakref.WeakMethod(step), inputs
        self.addresses = self.addresses_now()
        self.hidden_BD = step(*inputs)

    def addresses_now(self) -> list[int]:
        return [p.data_ptr() for p in self.step().__self__.model.parameters()]

    def replay(self) -> None:
        type(self).replays += 1
        assert self.addresses == self.addresses_now(), "the graph reads weights that are gone"
        self.hidden_BD.copy_(self.step()(*self.inputs))


@pytest.fixture
def captured(monkeypatch):
    def capture(self, step, size):
        graph = StandIn(step, (self._tokens_B[:size], self._cached_B[:size].fill_(-1), self.tables_BM[:size]))
        return graph, graph.hidden_BD

    monkeypatch.setattr(cuda_graphs, "can_capture", lambda model, device: True)
    monkeypatch.setattr(cuda_graphs.Graphs, "_capture", capture)
    monkeypatch.setattr(kv_attention, "heads_of", lambda *_: None)  # a CPU's short cut, which knows no padding
    monkeypatch.setattr(StandIn, "replays", 0)


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
    model = make_model()
    engine = make_engine(model, max_sequences=5, block_size=4)
    original, found = engine.decoder.round, []

    def noted(tokens_B, cached_B, prompts, *others):
        before, eager = StandIn.replays, []
        monkeypatch.setattr(
            engine.decoder, "_launched", lambda rows_B, *of: (eager.append(len(rows_B)), launch(rows_B, *of))[1]
        )
        hidden_BD = original(tokens_B, cached_B, prompts, *others)
        found.append((len(tokens_B), len(prompts), StandIn.replays - before, eager))
        return hidden_BD

    launch = engine.decoder._launched
    monkeypatch.setattr(engine.decoder, "round", noted)
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
    return cuda_graphs.Graphs(3, 1, torch.device("cpu"))


def test_a_capture_that_fails_names_the_cause(graphs):
    """And not what its end says of it."""

    def step(*_) -> torch.Tensor:
        if calls:
            raise UserError("the cause")
        calls.append("warm-up")
        return torch.zeros(8, 1)

    calls: list[str] = []
    with pytest.raises(UserError, match="the cause"):
        graphs(step, torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64))


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
