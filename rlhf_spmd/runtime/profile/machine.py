"""Describes the current machine, to recognise calibrations made on it, and finds its number of usable cores."""

import os
import platform
from collections.abc import Mapping
from contextlib import suppress
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
    try:
        first = CPU_INFO.read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.strip("\n").split("\n"))
    return {name.strip(): value.strip() for name, _, value in pairs}


def cpu_quota() -> float:
    """Returns the CPU quota of this process's control groups, in cores; inf without a quota."""
    return min(map(_quota, _groups("cpu")), default=inf)


def free_memory() -> float:
    """Returns bytes that this process may still take: of the machine, and of its control groups."""
    return min([psutil.virtual_memory().available, *map(_room, _groups("memory"))])


def _groups(controller: str) -> list[Path]:
    """Returns the folders of the control groups that limit this process, up to their roots."""
    try:
        lines = OWN_CGROUPS.read_text(encoding="utf-8", errors="replace").split("\n")
        groups = [line.split(":", 2) for line in lines if line]
    except OSError:
        return []
    found = []
    for _, controllers, path in groups:
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUPS / controllers if controllers else CGROUPS
        for folder in (inner := root / path.lstrip("/"), *inner.parents):
            found.append(folder)
            if folder == root:
                break
    return found


def _quota(folder: Path) -> float:
    """Returns the quota of one control group: version 2 has `cpu.max` with quota and period, version 1 a file for
    each."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text(encoding="utf-8") for name in ("quota", "period")
            )
        return inf if quota.strip() in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return inf


def _room(folder: Path) -> float:
    """Returns the bytes that one control group may still take, files in memory that nobody uses included: version 2 has
    `memory.max`, version 1 another name."""
    for most, taken in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        with suppress(OSError, ValueError):
            limit, used = ((folder / name).read_text(encoding="utf-8").strip() for name in (most, taken))
            if limit == "max":
                return inf
            lines = (folder / "memory.stat").read_text(encoding="utf-8").split("\n")
            unused = dict(line.split() for line in lines if line).get("inactive_file", 0)
            return int(limit) - int(used) + int(unused)
    return inf
