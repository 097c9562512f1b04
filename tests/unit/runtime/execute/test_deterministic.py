"""With deterministic=true, torch computes each training step by operations that repeat their bits on a GPU, too."""

import os
from types import SimpleNamespace

import pytest
import torch

from rlhf_spmd.command_line import ranks
from rlhf_spmd.runtime.engines.flat_engine import FlatEngine
from tests.folders import write_all
from tests.runs import RunOf, load


@pytest.mark.parametrize("value", ["true", "false"])
def test_backward_passes_are_those_that_repeat_their_bits(value, tmp_path, monkeypatch):
    during, backward = [], FlatEngine.backward

    def spied(engine, *arguments, **options):
        during.append(torch.are_deterministic_algorithms_enabled())
        return backward(engine, *arguments, **options)

    monkeypatch.setattr(FlatEngine, "backward", spied)
    RunOf(load(write_all(tmp_path), f"deterministic={value}")).iteration()
    assert during and set(during) == {value == "true"}
    assert not torch.are_deterministic_algorithms_enabled()  # what else a run does need not have such operations


def test_products_may_be_deterministic(tmp_path, monkeypatch):
    """torch refuses them otherwise; the variable is read when the first one is computed."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # restored afterwards
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(ranks, "communicators", lambda programs: ({}, {}))
    found = []
    world = SimpleNamespace(
        set_deadline=lambda deadline_s: None,
        start_torch=lambda *_: found.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG")),
    )
    words = write_all(tmp_path)
    for value in ("false", "true"):
        ranks.start_torch(world, load(words, f"deterministic={value}"), [])
    assert found == [None, ":4096:8"]
