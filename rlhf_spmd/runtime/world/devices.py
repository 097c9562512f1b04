"""Which device each rank computes on: one of its own, one that it shares with other ranks, or the CPU.

`device=auto` takes a device of its own for each rank, or the CPU where no rank sees a device; anything in between is
refused, so that nothing runs on the CPU unasked. `cuda` insists on devices; `cpu` ignores them. `shared` spreads any
number of ranks over the devices of their node and has their tensors travel through host memory (host_group.py): slow,
for developing strategies on a workstation.
"""

import ctypes
import importlib.util
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.cluster import device_type_of
from rlhf_spmd.runtime.world.visible_devices import Seen

if TYPE_CHECKING:
    from rlhf_spmd.plan.program.instructions import Program


BLOCKING_SYNC = 4  # CU_CTX_SCHED_BLOCKING_SYNC of CUDA's driver
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "shared": "host"}  # of torch.distributed, by kind of device


@dataclass(frozen=True, slots=True)
class Device:
    """Where a rank computes."""

    kind: str  # cpu, cuda or shared
    index: int | None  # among the devices that this rank sees; None: the CPU
    num_ranks: int  # that compute on the same one, this rank included
    num_devices: int  # of the whole job; CPUs count by nodes
    name: str = ""  # of the device, as torch has it
    num_bytes: int | None = None  # that it holds; None: a CPU


def choose(
    wanted: str,
    visible: Sequence[Sequence[Seen]],
    unseen: str,
    nodes: Sequence[int],
    hosts: Sequence[str],
) -> list[Device]:
    """The device of every rank. visible: what each rank sees; unseen: what hints at devices where a rank sees none,
    empty if nothing does; nodes, hosts: of each rank. Raises UserError where there are not the devices that `wanted`
    (the option `device`) asks for."""
    ranks_of = {node: [rank for rank, its_node in enumerate(nodes) if its_node == node] for node in set(nodes)}
    if wanted == "auto" and unseen and not any(visible):
        raise UserError(f"{unseen}; mend that, or choose device=cpu to run on the CPU")
    if wanted == "cpu" or wanted == "auto" and not any(visible):
        return [Device("cpu", None, len(ranks_of[node]), len(ranks_of)) for node in nodes]
    index_of: dict[int, int] = {}
    for ranks in (ranks_of[node] for node in sorted(ranks_of)):
        seen, host = [visible[rank] for rank in ranks], hosts[ranks[0]]
        found = {device.identity for devices in seen for device in devices}
        if not found or wanted == "shared" and not all(seen):
            blind = f"rank {ranks[[len(devices) for devices in seen].index(0)]} on " if found else ""
            raise UserError(
                f"device={wanted}, but {blind}{host} sees no device{f' ({unseen})' if unseen else ''}: nvidia-smi or "
                "rocm-smi there shows what the driver finds, and CUDA_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES what is "
                "left visible; device=cpu runs on the CPU"
            )
        seen = [[device.identity for device in devices] for devices in seen]
        indices = assign(seen) or (_spread(seen) if wanted == "shared" else None)
        if indices is None:
            raise UserError(
                f"{host} has {len(ranks)} rank{'s' * (len(ranks) > 1)} and {len(found)} "
                f"device{'s' * (len(found) > 1)} for them; start one rank for each device, or choose device=shared "
                "(ranks share devices, through host memory: slow, for trying things out) or device=cpu"
            )
        index_of |= dict(zip(ranks, indices, strict=True))
    own = [visible[rank][index_of[rank]] for rank in range(len(nodes))]
    kind, num_ranks = "shared" if wanted == "shared" else "cuda", Counter(device.identity for device in own)
    return [
        Device(kind, index_of[rank], num_ranks[device.identity], len(num_ranks), device.name, device.num_bytes)
        for rank, device in enumerate(own)
    ]


def _spread(visible: Sequence[Sequence[str]]) -> list[int]:
    """For each rank of a node the index of a device that it shares: the one with the fewest ranks so far."""
    taken = Counter()
    found = []
    for devices in visible:
        found.append(min(range(len(devices)), key=lambda index: taken[devices[index]]))
        taken[devices[found[-1]]] += 1
    return found


def type_of(device: Device, wanted: str) -> str:
    """The type of a device in forecasts. wanted: the option device_type, "cpu" unless it names what the devices are."""
    if device.index is None:
        return "cpu"
    return wanted if wanted != "cpu" else device_type_of(device.name, device.num_bytes)


def start(device: Device) -> Callable[[], int] | None:
    """Tells torch where this rank computes -> what reads how many bytes torch holds there, None for the CPU. Raises
    UserError if a GPU's kernels cannot be compiled."""
    import torch

    if device.index is None:
        return None
    if importlib.util.find_spec("triton") is None:
        raise UserError(
            f"this rank computes on {device.name}, whose kernels need the package triton: install the version that "
            f"belongs to torch {torch.__version__} (pip show torch names it), or choose device=cpu"
        )
    sleep_while_waiting(device.index)
    torch.cuda.set_device(device.index)
    return partial(torch.cuda.memory_reserved, device.index)


def sleep_while_waiting(index: int) -> bool:
    """Has this process sleep while it waits for a device, before anything runs there -> whether that could be set.

    CUDA's default is to spin: a rank that waits for a message in vain would look busy, and the watch (watch.py) would
    take it for one that works. A wait takes some microseconds longer, and leaves its core to others.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        set_flags = driver.cuDevicePrimaryCtxSetFlags_v2
    except (OSError, AttributeError):  # no driver of NVIDIA's
        return False
    handle = ctypes.c_int()
    steps = (
        lambda: driver.cuInit(0),
        lambda: driver.cuDeviceGet(ctypes.byref(handle), index),
        lambda: set_flags(handle, ctypes.c_uint(BLOCKING_SYNC)),
    )
    return all(step() == 0 for step in steps)


def describe(device: Device, num_ranks: int) -> str:
    """Where the ranks of the job compute, and what carries their messages."""
    import torch

    backend = BACKENDS[device.kind]
    if device.kind == "cpu":
        num = torch.get_num_threads()
        return f"CPU, {num} thread{'s' * (num > 1)} for each rank, {backend}"
    devices = f"{device.num_devices} x {device.name}"
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
