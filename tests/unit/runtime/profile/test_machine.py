"""The machine at hand: its processor, the cores that affinity and quotas leave, and a calibration made on it."""

import os
from dataclasses import dataclass, replace
from math import inf
from types import SimpleNamespace

import pytest

from rlhf_spmd.runtime.profile import machine as machine_module
from rlhf_spmd.runtime.profile.machine import cpu_info, cpu_quota, details, free_memory, machines, processor
from rlhf_spmd.runtime.world.devices import RankDevice

INFO = """processor	: 0
cpu family	: 6
model		: 143
model name	: Intel(R) Xeon(R) Processor
stepping	: 8
bogomips	: 5600.01
flags		: fpu avx2

processor	: 1
model name	: another
"""
FACTS = {"processor": "p", "details": "d", "threads": 1, "torch": "t"}


@dataclass
class Ranks:
    """A world of two ranks, of which the other one says what it is told to say."""

    other: list
    nodes: tuple[int, ...] = (0, 0)
    computes: RankDevice = RankDevice("cpu", None, 2, 1)

    def allgather(self, value, what):
        return [value, self.other]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Makes the folders that the module reads from: nothing is there yet."""
    monkeypatch.setattr(machine_module, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(machine_module, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine_module, "OWN_CGROUPS", tmp_path / "own")
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_the_first_processor_is_read(files):
    assert cpu_info() == {} and processor()
    write(files / "cpuinfo", INFO)
    info = cpu_info()
    assert processor() == "Intel(R) Xeon(R) Processor"
    assert details(info) == ["family 6", "model 143", "stepping 8", "2.8 GHz"]
    assert details({**info, "flags": "fpu amx_tile"})[-1] == "AMX" and details({}) == []


@pytest.mark.parametrize(
    ("own", "groups", "cores"),
    [
        ("", {}, inf),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, inf),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/a\n", {"b/cpu.max": "50000 100000\n"}, inf),
    ],
)
def test_quotas_are_read_up_to_the_root(files, own, groups, cores):
    write(files / "own", own)
    for name, text in groups.items():
        write(files / "cgroup" / name, text)
    assert cpu_quota() == cores


def test_memory_is_that_of_the_tightest_group(files, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    assert free_memory() == 1000
    write(files / "own", "0::/a/b\n")
    for name, text in {"a/b/memory.max": "max\n", "a/b/memory.current": "5\n", "a/memory.max": "700\n"}.items():
        write(files / "cgroup" / name, text)
    assert free_memory() == 1000  # nobody says what is taken of 700
    write(files / "cgroup" / "a/memory.current", "300\n")
    assert free_memory() == 400


def test_a_node_has_the_cores_of_its_ranks_up_to_the_quota(files):
    write(files / "cpuinfo", INFO)
    mine = os.sched_getaffinity(0)
    for others, quota, nodes, cores in (
        ([1000, 1001], 64, (0, 0), len(mine) + 2),
        (sorted(mine), 64, (0, 0), len(mine)),
        ([1000, 1001], 0.5, (0, 1), len(mine)),
        ([1000, 1001], 0.5, (0, 0), 0.5),
    ):
        first, second = machines(Ranks([FACTS, others, quota], nodes))
        assert first.cores == cores and second.processor == "p"
    assert second.cores == 0.5


def test_what_makes_another_machine(files, monkeypatch):
    write(files / "cpuinfo", INFO)
    here, again = (machines(Ranks([FACTS, [], 64]))[0] for _ in range(2))
    assert here == again
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "DEFAULT")
    slower, _ = machines(Ranks([FACTS, [], 64]))
    assert slower != here and slower.details.endswith(", DEFAULT")
    monkeypatch.setattr("torch.get_num_threads", lambda: 99)
    threaded, _ = machines(Ranks([FACTS, [], 64]))
    assert threaded == replace(slower, threads=99)
