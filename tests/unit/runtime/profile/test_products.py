"""The library of products of a job: measured, kept, agreed on, and taken from the run that is resumed."""

import json
import os
import threading
from collections import Counter
from dataclasses import asdict, replace
from typing import get_args

import pytest
import torch

from rlhf_spmd.config.options import Products
from rlhf_spmd.errors import UserError
from rlhf_spmd.files import user_cache
from rlhf_spmd.kernels import cpu
from rlhf_spmd.kernels.products import LIBRARIES, LINEAR, OneDNN, earns_packing, in_use, use
from rlhf_spmd.plan.workload import ModelShape
from rlhf_spmd.runtime.profile import products
from rlhf_spmd.runtime.profile.products import (
    Seconds,
    Table,
    choose,
    fastest,
    fastest_backward,
    limit_packing,
    measure,
    measure_backward,
    of_this_machine,
    table_of,
)
from tests.runs import OneRank

BIG = ModelShape(2, 256, 512, 4, 2, 64, 100)
SMALL = replace(BIG, hidden_size=64, head_dim=16, vocab_size=10**6)
HERE = Table("float32", "onednn", "linear", 3e-10, 2e-10, 1e-9, products.kind_of_machine(), torch.__version__, 1)


LINEAR_TABLE = replace(HERE, library="linear")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu, "is_missing", lambda: False)
    yield tmp_path / "rlhf_spmd" / "products"
    use({})


@pytest.fixture
def measured(monkeypatch) -> list[torch.dtype]:
    """Returns what was measured; oneDNN is found to be twice as fast."""
    asked = []

    def found(dtype):
        asked.append(dtype)
        return {"linear": Seconds(4e-10, 4e-10, 8e-9), "onednn": Seconds(3e-10, 2e-10, 4e-9, 1e-9, depends=False)}

    monkeypatch.setattr(products, "measure", found)
    monkeypatch.setattr(products, "measure_backward", lambda dtype: {"linear": 2.0, "native": 1.9})
    return asked


class TwoRanks(OneRank):
    """Rank 0 of two; the other one says `other` when all say something."""

    size, hosts, nodes = 2, ("here", "there"), (0, 1)

    def __init__(self, *other):
        self.other = list(other)

    def allgather(self, value, what="", **_):
        return [value, self.other or value]


def stored(**changed) -> products.Recorded:
    """Returns HERE as a run folder has it."""
    return json.loads(json.dumps(asdict(replace(HERE, **changed)))), "program.json"


def of(step_s: float, pass_s: float, *, depends: bool = False) -> Seconds:
    return Seconds(2 * step_s, step_s, pass_s, 0.0, depends)


def test_the_option_names_all_libraries():
    assert get_args(Products) == ("auto", *LIBRARIES)


def test_what_is_fastest():
    linear = of(1.0, 1.0, depends=True)
    assert fastest({"linear": linear}) == "linear"
    assert fastest({"linear": linear, "onednn": of(0.92, 0.92)}) == "linear"
    assert fastest({"linear": linear, "onednn": of(0.9, 0.9)}) == "onednn"
    assert fastest({"linear": linear, "onednn": of(0.2, 2.0)}) == "onednn"  # fewer seconds of a token
    both = {"linear": linear, "onednn": of(0.5, 0.5, depends=True), "other": of(0.54, 0.54)}
    assert fastest(both) == "other"  # as fast, and rows do not depend on each other
    assert fastest(both | {"other": of(0.56, 0.56)}) == "onednn"


def test_a_table_that_can_not_be_kept_is_told_of(measured, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    assert "the next start measures again" in choose(OneRank(), "auto", "float32", [BIG])[1]


def test_kernels_that_were_not_compiled_are_told_of(measured, monkeypatch):
    monkeypatch.setattr(cpu, "is_missing", lambda: True)
    assert "computed by onednn" in choose(OneRank(), "auto", "float32", [BIG])[1]
    assert not choose(OneRank(), "linear", "float32", [BIG])[1] and not choose(OneRank(), "auto", "float32", [SMALL])[1]


@pytest.mark.parametrize("times", [2, 4])
def test_measuring(monkeypatch, times):
    """By a clock that counts the bytes of the weights that each call reads, on few of them."""
    monkeypatch.setattr(products, "TIMED_BYTES", 1)
    monkeypatch.setattr(products, "LAYER", ((64, 96), (96, 64)))
    monkeypatch.setattr(products, "LIBRARIES", {"linear": LINEAR, "onednn": OneDNN()})
    counted, asked = [0], Counter()

    def multiply(self, x_NI, weight, bias):
        counted[0] += x_NI.shape[1] * 64 * (1 if isinstance(self, OneDNN) else times) * len(x_NI)
        asked[self.name] += 1
        return torch.ones(len(x_NI), 64)

    for kind in (OneDNN, type(LINEAR)):
        monkeypatch.setattr(kind, "multiply", multiply)
        monkeypatch.setattr(kind, "exists", lambda self, dtype: True)
    found = measure(torch.float32, clock=lambda: counted[0])
    assert found["linear"].token_s == times * found["onednn"].token_s > 0
    assert (asked["linear"] > 7 * 3) == (times == 2)  # what takes so much longer is measured once
    assert not found["onednn"].depends and fastest(found) == "onednn"
    monkeypatch.setattr(OneDNN, "exists", lambda self, dtype: False)
    before = counted[0]
    assert fastest(measure(torch.float32)) == "linear" and counted[0] == before


@pytest.mark.parametrize(("native_s", "chosen"), [(0.95, "linear"), (0.5, "native")])
def test_backward_products_are_chosen_apart(monkeypatch, native_s, chosen):
    """By a clock that counts products, in the first of eight matrices."""
    monkeypatch.setattr(products, "TIMED_BYTES", 1)
    monkeypatch.setattr(products, "LAYER", ((64, 96),) * 8)
    counted = [0.0]

    def counting(seconds):
        def mm(a_NM, b_MK):
            counted[0] += seconds
            return a_NM @ b_MK

        return mm

    monkeypatch.setattr(products, "BACKWARD", {"linear": counting(1.0), "native": counting(native_s)})
    monkeypatch.setattr(type(LIBRARIES["native"]), "exists", lambda self, dtype: True)
    found = measure_backward(torch.float32, lambda: counted[0])
    assert found["linear"] == 2 and found["native"] == pytest.approx(2 * native_s)
    assert fastest_backward(found) == chosen


def test_a_machine_is_measured_once(cache, measured):
    tables = [of_this_machine("float32") for _ in range(2)]
    assert tables[0] == tables[1] and measured == [torch.float32] and tables[0].library == "onednn"
    of_this_machine("bfloat16")
    assert len(list(cache.iterdir())) == len(measured) == 2
    for path in cache.iterdir():
        path.write_text('{"library": "onednn"}', encoding="utf-8")
    assert of_this_machine("float32") == tables[0] and len(measured) == 3  # it could not be read
    assert of_this_machine("float32") == tables[0] and len(measured) == 3


def test_a_new_library_is_measured(measured, monkeypatch):
    of_this_machine("float32")
    monkeypatch.setattr(OneDNN, "exists", lambda self, dtype: False)
    of_this_machine("float32")
    assert len(measured) == 2


def test_the_first_of_several_starts_counts(cache, monkeypatch):
    """All measure at the same time and find something else; all use what one of them found."""
    together, numbers, found = threading.Barrier(4), iter(range(1, 5)), []

    def other(dtype):
        together.wait()
        return {"linear": of(100.0, 100.0), "onednn": of(float(next(numbers)), 1.0)}

    monkeypatch.setattr(products, "measure", other)
    threads = [threading.Thread(target=lambda: found.append(of_this_machine("float32"))) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(found) == 4 and len(set(found)) == 1 and len(list(cache.iterdir())) == 1


def test_without_a_folder_it_is_measured_again(measured, monkeypatch):
    monkeypatch.setattr(user_cache, "user_cache", lambda kind: None)
    assert of_this_machine("float32") == of_this_machine("float32") and len(measured) == 2


def test_choosing(measured):
    world = OneRank()
    table, note = choose(world, "auto", "float32", [SMALL, None, BIG])
    assert table.library == in_use(torch.float32).name == "onednn" and not note
    assert in_use(torch.bfloat16) is in_use(torch.float64) is LINEAR
    for wanted, shapes in (("linear", [BIG]), ("auto", [SMALL]), ("onednn", [SMALL]), ("auto", [None])):
        assert choose(world, wanted, "float32", shapes) == (None, "") and in_use(torch.float32) is LINEAR
    table, _ = choose(world, "onednn", "float32", [BIG])
    assert table.library == "onednn" and measured == [torch.float32]


def test_a_rank_that_lacks_the_library(measured):
    world = TwoRanks(False, HERE.machine, HERE.torch)
    with pytest.raises(UserError, match=r"products=onednn: rank 1 \(host there\) cannot .* give products=auto"):
        choose(world, "onednn", "float32", [BIG])
    table, note = choose(world, "auto", "float32", [BIG])
    assert table.library == "linear" and in_use(torch.float32) is LINEAR
    assert (
        note.startswith("rank 1 (host there) cannot compute") and "onednn" in note and note.endswith("F.linear is used")
    )
    assert choose(world, "auto", "float32", [BIG], stored())[1].endswith("numbers differ in their last digits")


def test_a_resumed_run_keeps_its_library(measured):
    """Whatever is faster here; and says so if that may change numbers."""
    assert choose(OneRank(), "auto", "float32", [BIG], stored(plain_s=7.0))[0].plain_s == 7.0
    table, note = choose(OneRank(), "auto", "float32", [BIG], stored(machine="model 9"))
    assert table.library == "onednn" and note.startswith("the run was started on model 9 with torch ")
    assert choose(TwoRanks(True, "model 9", HERE.torch), "auto", "float32", [BIG], stored())[1].count("(host there)")
    assert not measured and table_of(*stored()) == HERE


def test_packing_needs_memory(monkeypatch):
    monkeypatch.setattr(products, "free_memory", lambda: 1000)
    weight, asked = torch.ones(2, 2), {}
    for other, copies in (([0, 1000], 500), ([0, 1000], 501), ([600, 1000], 500)):
        use({"float32": HERE.choice})
        note = limit_packing(TwoRanks(*other), HERE, copies)
        asked[other[0], copies] = note, earns_packing(weight, 1e6)
    too_little = "too little memory is free for packed weights on {}: generation is slower there"
    assert asked == {
        (0, 500): ("", True),
        (0, 501): (too_little.format("rank 0 (host here)"), False),
        (600, 500): (too_little.format("rank 1 (host there)"), True),
    }
    assert limit_packing(TwoRanks(0, 0), None, 10**9) == limit_packing(TwoRanks(0, 0), LINEAR_TABLE, 10**9) == ""


@pytest.mark.parametrize(
    "values", [3, {}, asdict(HERE) | {"library": "blas"}, asdict(HERE) | {"threads": "1"}, asdict(HERE) | {"more": 1}]
)
def test_a_file_without_a_table(values):
    with pytest.raises(UserError, match=r"program.json names no matmul library .*; restore the file"):
        table_of(values, "program.json")
