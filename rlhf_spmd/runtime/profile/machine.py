"""Describes the current machine, to recognise calibrations made on it, and finds its number of usable cores."""

import os
import platform
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from rlhf_spmd.plan.cost.calibration import Machine

if TYPE_CHECKING:
    from rlhf_spmd.runtime.world.world import World

CPU_INFO, CGROUPS, OWN_CGROUPS = Path("/proc/cpuinfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def machines(world: "World") -> list[Machine]:
    """Returns the machine of every rank, with the cores of all ranks of its node. Collective; call it after
    start_torch."""
    import torch

    index = world.computes.index
    mine = {
        "processor": processor() if index is None else torch.cuda.get_device_name(index),
        "details": kind_of_machine(name=index is not None),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    every = world.allgather([mine, sorted(os.sched_getaffinity(0)), cpu_quota()], "the machines")
    of_rank = []
    for rank, (facts, _, _) in enumerate(every):
        others = [one for other, one in enumerate(every) if world.nodes[other] == world.nodes[rank]]
        cores = {core for _, allowed, _ in others for core in allowed}
        most = min(quota for _, _, quota in others)
        of_rank.append(Machine(**facts, cores=round(float(min(len(cores), most)), 2)))  # rounded as in a file
    return of_rank


def kind_of_machine(*, name: bool = True) -> str:
    """Returns what machines with equal calibrations have in common. Imports torch.

    name: with the processor's.
    """
    import torch

    parts = [*details(cpu_info()), torch.backends.cpu.get_cpu_capability()]
    return ", ".join([processor(), *parts] if name else parts)


def processor() -> str:
    """Returns the name of this machine's processor."""
    return cpu_info().get("model name") or platform.machine()


def details(info: Mapping[str, str]) -> list[str]:
    """Distinguishes processors of the same name, which are common in virtual machines. info: from cpu_info()."""
    parts = [
        f"{name.removeprefix('cpu ')} {info[name]}" for name in ("cpu family", "model", "stepping") if name in info
    ]
    if "bogomips" in info:  # twice the frequency of the time stamp counter
        parts.append(f"{float(info['bogomips']) / 2000:.1f} GHz")
    if "amx_tile" in info.get("flags", "").split():  # not contained in torch's CPU capability
        parts.append("AMX")
    return parts


def cpu_info() -> dict[str, str]:
    """Returns the fields of the first processor in /proc/cpuinfo; empty if there is no such file."""
    lines = _text(CPU_INFO).partition("\n\n")[0].split("\n")
    pairs = [line.partition(":") for line in lines if line]
    return {name.strip(): value.strip() for name, _, value in pairs}


def cpu_quota() -> float:
    """Returns the CPU quota of this process's control groups, in cores; inf without a quota."""
    quotas = [inf]
    for folder in _groups():
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if period and quota != "max":
            quotas.append(int(quota) / int(period))
    return min(quotas)


def free_memory() -> float:
    """Returns bytes that this process may still take: of the machine, and of its control groups."""
    free = [psutil.virtual_memory().available]
    for folder in _groups():
        limit, used = _text(folder / "memory.max"), _text(folder / "memory.current")
        if limit.isdigit() and used:
            free.append(int(limit) - int(used))
    return min(free)


def _groups() -> list[Path]:
    """Returns the folders of the control groups (version 2) that limit this process, from the root on."""
    parts = _text(OWN_CGROUPS).rpartition("0::/")[2].split("/")
    return [CGROUPS.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def _text(path: Path) -> str:
    """Returns the text of a file; empty if there is none."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
