"""The machine at hand: what a calibration that was made on it is recognised by, and how many cores a quota leaves."""

import os
import platform
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_spmd.plan.cost.calibration import Machine

if TYPE_CHECKING:
    from rlhf_spmd.runtime.world.world import World

CPU_INFO, CGROUPS, OWN_CGROUPS = Path("/proc/cpuinfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def machines(world: "World") -> list[Machine]:
    """The machine of every rank, with the cores of all ranks of its node. Collective; torch must have been started."""
    import torch

    told, index = [*details(cpu_info()), torch.backends.cpu.get_cpu_capability()], world.computes.index
    if index is not None:
        told.insert(0, processor())
    mine = {
        "processor": processor() if index is None else torch.cuda.get_device_name(index),
        "details": ", ".join(told),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    every = world.allgather([mine, sorted(os.sched_getaffinity(0)), cpu_quota()], "the machines")
    found = []
    for rank, (facts, _, _) in enumerate(every):
        others = [one for other, one in enumerate(every) if world.nodes[other] == world.nodes[rank]]
        cores = {core for _, allowed, _ in others for core in allowed}
        most = min(quota for _, _, quota in others)
        found.append(Machine(**facts, cores=round(float(min(len(cores), most)), 2)))  # as a file keeps it
    return found


def processor() -> str:
    """The name of this machine's processor."""
    return cpu_info().get("model name") or platform.machine()


def details(info: Mapping[str, str]) -> list[str]:
    """What tells apart processors of one name: virtual machines often have no other. info: as of cpu_info()."""
    told = [f"{name.removeprefix('cpu ')} {info[name]}" for name in ("cpu family", "model", "stepping") if name in info]
    if "bogomips" in info:  # twice the clock that the time stamps count at
        told.append(f"{float(info['bogomips']) / 2000:.1f} GHz")
    if "amx_tile" in info.get("flags", "").split():  # torch's word for its instructions does not tell
        told.append("AMX")
    return told


def cpu_info() -> dict[str, str]:
    """What Linux says of the first processor; empty elsewhere."""
    try:
        first = CPU_INFO.read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def cpu_quota() -> float:
    """How many cores' worth of time the control groups of this process may use; inf without a quota."""
    try:
        groups = [line.split(":", 2) for line in OWN_CGROUPS.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return inf
    found = inf
    for _, controllers, path in groups:
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = CGROUPS / controllers if controllers else CGROUPS
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents):
            found = min(found, _quota(folder))
            if folder == root:
                break
    return found


def _quota(folder: Path) -> float:
    """Of one control group: `cpu.max` has quota and period in version 2, version 1 a file for each."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return inf if quota.strip() in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return inf
