"""Weights that are kept in host memory for a GPU, on a CPU that plays one."""

import gc
import mmap
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlhf_spmd.plan.cost.memory import static_bytes
from rlhf_spmd.runtime.weights.frozen_weights import OffloadedCopy
from rlhf_spmd.runtime.weights.rank_models import RankModels
from rlhf_spmd.strategies import reallocation
from tests.folders import write_all
from tests.runs import OneRank, compiled, load


class OnGPU(nn.Parameter):
    """A weight that says that it is on a GPU."""

    device = torch.device("cuda", 0)


class Driver:
    """What the driver has pinned: the size by the address."""

    def __init__(self, error: int = 0):
        self.pinned: dict[int, int] = {}
        self.error = error

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.pinned[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> None:
        del self.pinned[address]


class Stream:
    """A stream that does everything at once."""

    def __init__(self, device: object = None):
        pass

    def wait_stream(self, other: object) -> None:
        assert isinstance(other, Stream)


@pytest.fixture()
def streams(monkeypatch):
    """Streams where there is no GPU."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


@pytest.mark.usefixtures("streams")
def test_offloaded_weights_pin_the_bytes_that_the_plan_counts(tmp_path, monkeypatch):
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    config = load(write_all(tmp_path))
    program = compiled(config, place=reallocation.place, offload=True)
    models = RankModels(program, config, OneRank())
    copies, expected = [], []
    for key in models.offloaded:
        models.offloaded[key].load()
        weights = [OnGPU(p.data) for p in models.copies[key].parameters()]
        expected.append([p.data.clone() for p in sorted(weights, key=lambda p: p.dim() < 2)])
        copies.append(OffloadedCopy(SimpleNamespace(parameters=lambda weights=weights: weights)))
        assert all(p.numel() == 0 for p in weights)
    assert len(copies) == len(driver.pinned) == 2  # the reference and the reward model
    assert all(address % mmap.PAGESIZE == 0 for address in driver.pinned)  # it pins pages, and none twice
    assert sum(driver.pinned.values()) == static_bytes(program, 0)["offloaded"]
    for copy, weights in zip(copies, expected, strict=True):
        copy._device = torch.device("cpu")
        copy.load()
        assert all(torch.equal(p, weight) for p, weight in zip(copy._weights, weights, strict=True))
        assert len({p.untyped_storage().data_ptr() for p in copy._weights}) == 1  # in one piece
    del copies, copy
    gc.collect()
    assert not driver.pinned
