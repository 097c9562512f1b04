"""The library of products of a job: measured, kept, agreed on, and taken from the run that is resumed."""

import json
from dataclasses import asdict, replace
from typing import NamedTuple

import pytest
import torch

from rlhf_spmd.errors import UserError
from rlhf_spmd.kernels import cpu
from rlhf_spmd.kernels.products import LINEAR, Choice, OneDNN, earns_packing, in_use, use
from rlhf_spmd.plan.workload import ModelShape
from rlhf_spmd.runtime.profile import products
from rlhf_spmd.runtime.profile.products import choice_of, choose, limit_packing, measure, of_this_machine
from tests.runs import OneRank

BIG = ModelShape(2, 256, 512, 4, 2, 64, 100)
SMALL = replace(BIG, hidden_size=64, head_dim=16, vocab_size=10**6)
HERE = Choice("onednn", "linear", 3e-10, 2e-10, 1e-9)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu, "is_missing", lambda: False)
    yield tmp_path / "rlhf_spmd" / "products"
    use({})


@pytest.fixture
def measured(monkeypatch) -> list[torch.dtype]:
    """Returns what was measured; oneDNN is the fastest."""
    asked = []
    monkeypatch.setattr(products, "measure", lambda dtype: (asked.append(dtype), HERE)[1])
    return asked


class Options(NamedTuple):
    products: str
    dtype: str = "float32"


class TwoRanks(OneRank):
    """Rank 0 of two; the other one says `other` when all say something."""

    size, hosts, nodes = 2, ("here", "there"), (0, 1)

    def __init__(self, other):
        self.other = other

    def allgather(self, value, what="", **_):
        return [value, self.other]


def stored(**changed) -> products.Recorded:
    """Returns HERE as a run folder has it."""
    return json.loads(json.dumps(asdict(replace(HERE, **changed)))), "program.json"


@pytest.mark.parametrize(("times", "native_s", "backward"), [(2, 0.5, "native"), (4, 1.5, "linear")])
def test_measuring(monkeypatch, times, native_s, backward):
    """By a clock that counts the bytes of the weights that each call reads, on few of them, and backward products."""
    monkeypatch.setattr(products, "TIMED_BYTES", 1)
    monkeypatch.setattr(products, "LAYER", ((64, 96), (96, 64)) * 4)
    monkeypatch.setattr(products, "LIBRARIES", {"linear": LINEAR, "onednn": OneDNN(), "native": LINEAR})
    counted = [0.0]

    def multiply(self, x_NI, weight, bias):
        counted[0] += x_NI.shape[1] * 64 * (1 if isinstance(self, OneDNN) else times) * len(x_NI)
        return torch.ones(len(x_NI), 64)

    def counting(seconds):
        def mm(a_NM, b_MK):
            counted[0] += seconds
            return a_NM @ b_MK

        return mm

    for kind in (OneDNN, type(LINEAR)):
        monkeypatch.setattr(kind, "multiply", multiply)
        monkeypatch.setattr(kind, "exists", lambda self, dtype: True)
    monkeypatch.setattr(products, "BACKWARD", {"linear": counting(1.0), "native": counting(native_s)})
    choice = measure(torch.float32, clock=lambda: counted[0])
    assert choice.library == "onednn" and choice.backward == backward
    assert choice.plain_s == choice.packed_s > 0 == choice.pack_s
    monkeypatch.setattr(products, "LIBRARIES", {"linear": LINEAR})
    before = counted[0]
    assert measure(torch.float32) == Choice("linear") and counted[0] == before


def test_a_machine_is_measured_once(cache, measured):
    choices = [of_this_machine("float32") for _ in range(2)]
    assert choices == [HERE, HERE] and measured == [torch.float32]
    of_this_machine("bfloat16")
    assert len(list(cache.iterdir())) == len(measured) == 2
    for path in cache.iterdir():
        path.write_text('{"library": 3}', encoding="utf-8")
    assert of_this_machine("float32") == HERE and len(measured) == 3  # it could not be read
    assert of_this_machine("float32") == HERE and len(measured) == 3


def test_choosing(measured):
    world = OneRank()
    choice, note = choose(world, Options("auto"), [SMALL, None, BIG])
    assert choice.library == in_use(torch.float32).name == "onednn" and not note
    assert in_use(torch.bfloat16) is in_use(torch.float64) is LINEAR
    for wanted, shapes in (("linear", [BIG]), ("auto", [SMALL]), ("onednn", [SMALL]), ("auto", [None])):
        assert choose(world, Options(wanted), shapes) == (None, "") and in_use(torch.float32) is LINEAR
    choice, _ = choose(world, Options("onednn"), [BIG])
    assert choice.library == "onednn" and measured == [torch.float32]


def test_a_rank_that_lacks_the_library(measured):
    world = TwoRanks(False)
    with pytest.raises(UserError, match=r"products=onednn: rank 1 \(host there\) cannot .* give products=auto"):
        choose(world, Options("onednn"), [BIG])
    choice, note = choose(world, Options("auto"), [BIG])
    assert choice.library == "linear" and in_use(torch.float32) is LINEAR
    assert note == "rank 1 (host there) cannot compute matmuls by onednn: F.linear is used"
    assert choose(world, Options("auto"), [BIG], stored())[1].endswith("numbers differ in their last digits")


def test_a_resumed_run_keeps_its_library(measured):
    """Whatever is faster here."""
    assert choose(OneRank(), Options("auto"), [BIG], stored(plain_s=7.0))[0].plain_s == 7.0
    assert not measured and choice_of(*stored()) == HERE


def test_packing_needs_memory(monkeypatch):
    monkeypatch.setattr(products, "free_memory", lambda: 1000)
    weight, asked = torch.ones(2, 2), {}
    for other, copies in (((1, 0, 1000), 500), ((1, 0, 1000), 501), ((1, 600, 1000), 500)):
        use({"float32": HERE})
        note = limit_packing(TwoRanks(other), Options("auto"), HERE, copies)
        asked[other[1], copies] = note, earns_packing(weight, 1e6)
    too_little = "too little memory is free for packed weights on {}: generation is slower there"
    assert asked == {
        (0, 500): ("", True),
        (0, 501): (too_little.format("rank 0 (host here)"), False),
        (600, 500): (too_little.format("rank 1 (host there)"), True),
    }
    for choice in (None, Choice("linear")):
        assert limit_packing(OneRank(), Options("auto"), choice, 10**9) == ""


def test_a_user_without_a_home_has_no_cache(tmp_path, monkeypatch, measured):
    """Such as one who is not in passwd, as in a container: then nothing is written to a folder called ~."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.chdir(tmp_path)
    assert of_this_machine("float32") == HERE == of_this_machine("float32")
    assert len(measured) == 2 and not list(tmp_path.iterdir())
