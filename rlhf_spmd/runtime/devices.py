"""Which device each rank computes on: one of its own, one that it shares with other ranks, or the CPU.

`device=auto` takes a device of its own for each rank, or the CPU where no rank sees a device; anything in between is
refused, so that nothing runs on the CPU unasked. `cuda` insists on devices; `cpu` ignores them. `shared` spreads any
number of ranks over the devices of their node and has their tensors travel through host memory (host_group.py): slow,
for developing strategies on a workstation.
"""

import ctypes
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rlhf_spmd.errors import UserError

if TYPE_CHECKING:
    from rlhf_spmd.plan.program import Program


BACKENDS = {"cpu": "gloo", "cuda": "nccl", "shared": "host"}  # of torch.distributed, by kind of device


@dataclass(frozen=True, slots=True)
class Device:
    """Where a rank computes."""

    kind: str  # cpu, cuda or shared
    index: int | None  # among the devices that this rank sees; None: the CPU
    num_ranks: int  # that compute on the same one, this rank included
    num_devices: int  # of the whole job; CPUs count by nodes
    is_asked_for: bool = True  # False: the CPU, as no rank saw a device


def choose(wanted: str, visible: Sequence[Sequence[str]], nodes: Sequence[int], hosts: Sequence[str]) -> list[Device]:
    """The device of every rank. visible: UUIDs of the devices that each rank sees; nodes, hosts: of each rank. Raises
    UserError where there are not the devices that `wanted` (the option `device`) asks for."""
    ranks_of = {node: [rank for rank, its_node in enumerate(nodes) if its_node == node] for node in set(nodes)}
    if wanted == "cpu" or wanted == "auto" and not any(visible):
        return [Device("cpu", None, len(ranks_of[node]), len(ranks_of), wanted == "cpu") for node in nodes]
    index_of: dict[int, int] = {}
    for ranks in (ranks_of[node] for node in sorted(ranks_of)):
        seen, host = [visible[rank] for rank in ranks], hosts[ranks[0]]
        found = {device for devices in seen for device in devices}
        if not found or wanted == "shared" and not all(seen):
            blind = f"rank {ranks[[len(devices) for devices in seen].index(0)]} on " if found else ""
            raise UserError(
                f"device={wanted}, but {blind}{host} sees no device: nvidia-smi there shows what the driver finds, and "
                "CUDA_VISIBLE_DEVICES what is left visible; device=cpu runs on the CPU"
            )
        indices = assign(seen) or (_spread(seen) if wanted == "shared" else None)
        if indices is None:
            raise UserError(
                f"{host} has {len(ranks)} rank{'s' * (len(ranks) > 1)} and {len(found)} "
                f"device{'s' * (len(found) > 1)} for them; start one rank for each device, or choose device=shared "
                "(ranks share devices, through host memory: slow, for trying things out) or device=cpu"
            )
        index_of |= dict(zip(ranks, indices, strict=True))
    uuids = [visible[rank][index_of[rank]] for rank in range(len(nodes))]
    kind = "shared" if wanted == "shared" else "cuda"
    return [Device(kind, index_of[rank], uuids.count(uuid), len(set(uuids))) for rank, uuid in enumerate(uuids)]


def _spread(visible: Sequence[Sequence[str]]) -> list[int]:
    """For each rank of a node the index of a device that it shares: the one with the fewest ranks so far."""
    taken = Counter()
    found = []
    for devices in visible:
        found.append(min(range(len(devices)), key=lambda index: taken[devices[index]]))
        taken[devices[found[-1]]] += 1
    return found


def start(device: Device) -> Callable[[], int] | None:
    """Tells torch where this rank computes -> what reads how many bytes torch holds there, None for the CPU. Raises
    UserError if that is the CPU unasked while torch sees devices."""
    import torch

    if device.index is not None:
        # As many hardware queues as there may be: a message of one communicator must not stand behind another's.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        torch.cuda.set_device(device.index)
        return partial(torch.cuda.memory_reserved, device.index)
    if not device.is_asked_for and torch.cuda.is_available():
        raise UserError(
            f"torch sees {torch.cuda.device_count()} devices, but libnvidia-ml.so.1, which tells them apart, finds "
            "none; install NVIDIA's driver libraries (in a container: the capability `utility`), or choose device=cpu"
        )
    return None


def describe(device: Device, num_ranks: int) -> str:
    """Where the ranks of the job compute, and what carries their messages."""
    import torch

    backend = BACKENDS[device.kind]
    if device.kind == "cpu":
        num = torch.get_num_threads()
        return f"CPU, {num} thread{'s' * (num > 1)} for each rank, {backend}"
    devices = f"{device.num_devices} x {torch.cuda.get_device_name(device.index)}"
    if device.kind == "cuda":
        return f"{devices}, {backend}"
    return f"{devices}, shared by {num_ranks} ranks, whose messages go through host memory (gloo)"


def refuse(device: Device, program: "Program") -> None:
    """Raises UserError for what can't run where ranks share a device."""
    if device.kind != "shared":
        return
    for call in program.workload.workflow.placed_calls:
        zero = program.placement.layouts[call.name].zero
        if call.kind == "train" and zero > 1:
            raise UserError(
                f"{call.name} has ZeRO {zero}, which is DeepSpeed's and needs NCCL or the CPU; with device=shared use "
                "ZeRO 0 or 1"
            )


def visible_devices() -> list[str]:
    """The UUIDs of the NVIDIA devices that this process may use, in order, without torch or CUDA; [] if none."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    uuids = []
    for index in range(count.value):
        handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        if (
            nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) == 0
            and nvml.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(96)) == 0
        ):
            uuids.append(uuid.value.decode())
    nvml.nvmlShutdown()
    return chosen_devices(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))


def chosen_devices(uuids: Sequence[str], chosen: str | None) -> list[str]:
    """Those of `uuids` that CUDA_VISIBLE_DEVICES leaves visible: numbers or beginnings of UUIDs, up to a bad one."""
    if chosen is None:
        return list(uuids)
    visible: list[str] = []
    for entry in (part.strip() for part in chosen.split(",")):
        if entry.startswith("MIG-"):
            found = [entry]
        elif entry.isdigit():
            found = list(uuids[int(entry) : int(entry) + 1])
        else:
            found = [uuid for uuid in uuids if entry and uuid.startswith(entry)]
        if len(found) != 1 or found[0] in visible:
            break
        visible += found
    return visible


def assign(visible: Sequence[Sequence[str]]) -> list[int] | None:
    """For each rank of a node the index, among the devices visible to it, of one that is its own; None if too few.

    Ranks may see all devices of the node or, where the launcher bound them, one each, or anything in between.
    """
    owner: dict[str, int] = {}

    def found(rank: int, tried: set[str]) -> bool:
        """Whether the rank gets a device, if need be by others' taking another one (augmenting paths)."""
        for device in sorted(visible[rank], key=lambda device: device in owner):
            if device not in tried:
                tried.add(device)
                if device not in owner or found(owner[device], tried):
                    owner[device] = rank
                    return True
        return False

    if not all(found(rank, set()) for rank in range(len(visible))):
        return None
    own = {rank: device for device, rank in owner.items()}
    return [list(devices).index(own[rank]) for rank, devices in enumerate(visible)]
