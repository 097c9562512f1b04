"""Chooses the device of each rank: its own, one shared with other ranks, or the CPU.

`device=auto` gives each rank its own device, or uses the CPU if no rank sees a device; anything in between is an error,
so nothing runs on the CPU by accident. `cuda` requires devices; `cpu` ignores them. `shared` distributes any number of
ranks over the devices of their node and sends their tensors through host memory (host_group.py): slow, for developing
strategies on a workstation.
"""

import ctypes
import importlib.util
import os
import shutil
import socket
import stat
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.cluster import device_type_of
from rlhf_spmd.plan.workflow import Train
from rlhf_spmd.runtime.world.visible_devices import VisibleDevice

if TYPE_CHECKING:
    from rlhf_spmd.plan.program.instructions import Program


BLOCKING_SYNC = 4  # CU_CTX_SCHED_BLOCKING_SYNC of CUDA's driver
COMPILERS = ("clang", "gcc")  # that Triton looks for if CC names none
KERNELS = ("TRITON_CACHE_DIR", "TRITON_HOME")  # where Triton keeps compiled kernels: the folder, or the one above it
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "shared": "host"}  # of torch.distributed, by kind of device


@dataclass(frozen=True, slots=True)
class RankDevice:
    """The device of a rank."""

    kind: str  # cpu, cuda or shared
    index: int | None  # among the devices that this rank sees; None: the CPU
    num_ranks: int  # that compute on the same device, including this rank
    num_devices: int  # of the whole job; the CPUs of a node count as one
    name: str = ""  # of the device, from torch
    num_bytes: int | None = None  # its memory; None: a CPU


def choose_devices(
    wanted: str,
    visible: Sequence[Sequence[VisibleDevice]],
    unseen: str,
    nodes: Sequence[int],
    hosts: Sequence[str],
) -> list[RankDevice]:
    """Chooses the device of every rank. Raises UserError if the devices do not suffice for `wanted`.

    wanted: the option `device`.
    visible: the devices that each rank sees.
    unseen: evidence of devices on a rank that sees none, or empty.
    nodes, hosts: of each rank.
    """
    ranks_of = {node: [rank for rank, its_node in enumerate(nodes) if its_node == node] for node in set(nodes)}
    if wanted == "auto" and unseen and not any(visible):
        raise UserError(f"{unseen}; fix that, or choose device=cpu to run on the CPU")
    if wanted == "cpu" or wanted == "auto" and not any(visible):
        return [RankDevice("cpu", None, len(ranks_of[node]), len(ranks_of)) for node in nodes]
    index_of: dict[int, int] = {}
    for ranks in (ranks_of[node] for node in sorted(ranks_of)):
        seen, host = [visible[rank] for rank in ranks], hosts[ranks[0]]
        identities = {device.identity for devices in seen for device in devices}
        if not identities or wanted == "shared" and not all(seen):
            blind = f"rank {ranks[[len(devices) for devices in seen].index(0)]} on " if identities else ""
            raise UserError(
                f"device={wanted}, but {blind}{host} sees no device{f' ({unseen})' if unseen else ''}: check with "
                "nvidia-smi or rocm-smi which devices the driver finds there, and whether CUDA_VISIBLE_DEVICES or "
                "ROCR_VISIBLE_DEVICES hides them; device=cpu runs on the CPU"
            )
        of_rank = [[device.identity for device in devices] for devices in seen]
        indices = assign(of_rank) or (_spread(of_rank) if wanted == "shared" else None)
        if indices is None:
            raise UserError(
                f"{host} has {len(ranks)} rank{'s' * (len(ranks) > 1)} and {len(identities)} "
                f"device{'s' * (len(identities) > 1)} for them; start one rank per device, or choose device=shared "
                "(ranks share devices, through host memory: slow, for development) or device=cpu"
            )
        index_of |= dict(zip(ranks, indices, strict=True))
    own = [visible[rank][index_of[rank]] for rank in range(len(nodes))]
    kind, num_ranks = "shared" if wanted == "shared" else "cuda", Counter(device.identity for device in own)
    return [
        RankDevice(kind, index_of[rank], num_ranks[device.identity], len(num_ranks), device.name, device.num_bytes)
        for rank, device in enumerate(own)
    ]


def _spread(visible: Sequence[Sequence[str]]) -> list[int]:
    """Returns, for each rank of a node, the index of a device to share: the one with the fewest ranks so far."""
    taken: Counter[str] = Counter()
    indices = []
    for devices in visible:
        indices.append(min(range(len(devices)), key=lambda index: taken[devices[index]]))
        taken[devices[indices[-1]]] += 1
    return indices


def type_of(device: RankDevice, wanted: str) -> str:
    """Returns the type of a device in forecasts. wanted: the option device_type; "cpu" means not set."""
    if device.index is None:
        return "cpu"
    if wanted != "cpu":
        return wanted
    assert device.num_bytes is not None, "only a CPU has no known memory"
    return device_type_of(device.name, device.num_bytes)


def select_device(device: RankDevice) -> Callable[[], int] | None:
    """Selects this rank's device in torch -> a function that returns the bytes torch has reserved there, None for the
    CPU. Raises UserError if its kernels cannot be compiled here."""
    import torch

    if device.index is None:
        return None
    if lack := lack_for_kernels(os.environ):
        raise UserError(f"this rank computes on {device.name}, {lack}, or choose device=cpu")
    keep_kernels_on_node(os.environ)
    sleep_while_waiting(device.index)
    torch.cuda.set_device(device.index)
    return partial(torch.cuda.memory_reserved, device.index)


def lack_for_kernels(environ: Mapping[str, str]) -> str:
    """Returns what is missing to compile GPU kernels, and the fix; empty if nothing is: Triton and, for the code by
    which it launches each kernel for the first time, a C compiler and Python's headers. Without them the first
    iteration would fail."""
    import torch

    if importlib.util.find_spec("triton") is None:
        return (
            f"whose kernels need the package triton: install the version that torch {torch.__version__} requires (see "
            "pip show torch)"
        )
    host, wanted = socket.gethostname(), environ.get("CC")
    names = COMPILERS if wanted is None else (wanted,)
    if not any(map(shutil.which, names)):
        return (
            f"whose kernels Triton launches by code that it compiles, but {host} has no C compiler "
            f"({' or '.join(names)}): install gcc, or name a compiler in CC"
        )
    scheme = sysconfig.get_default_scheme()  # Debian's own one names a folder that need not exist
    include = sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
    if not os.path.isfile(os.path.join(include, "Python.h")):
        return (
            f"whose kernels Triton launches by code that it compiles, but {host} has no Python.h in {include}: install "
            "the headers of this Python (python3-dev or python3-devel)"
        )
    return ""


def keep_kernels_on_node(environ: MutableMapping[str, str]) -> None:
    """Makes Triton keep compiled kernels in a folder of this node and user, where the user names no other: by default
    they are in the home folder, mostly on a network's file system, to which all ranks of all nodes write at once."""
    if any(name in environ for name in KERNELS):
        return
    path = os.path.join(tempfile.gettempdir(), f"rlhf_spmd_triton_{os.getuid()}")
    with suppress(OSError):
        os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.lstat(path)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            environ[KERNELS[0]] = path  # nobody else may put code there


def sleep_while_waiting(index: int) -> bool:
    """Makes this process sleep while it waits for a device; call it before using the device -> whether it succeeded.

    CUDA spins by default, so a rank stuck in a wait for a message would look busy to the watch (hang_watch.py). With
    sleep, a wait takes some microseconds longer and leaves the core to others.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        set_flags = driver.cuDevicePrimaryCtxSetFlags_v2
    except (OSError, AttributeError):  # no driver of NVIDIA's
        return False
    handle = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGet(ctypes.byref(handle), index) != 0:
        return False
    return set_flags(handle, ctypes.c_uint(BLOCKING_SYNC)) == 0


def describe_device(device: RankDevice, num_ranks: int) -> str:
    """Describes, for messages, the devices of the job and the backend of its collectives."""
    import torch

    backend = BACKENDS[device.kind]
    if device.kind == "cpu":
        num = torch.get_num_threads()
        return f"CPU, {num} thread{'s' * (num > 1)} for each rank, {backend}"
    devices = f"{device.num_devices} x {device.name}"
    if device.kind == "cuda":
        return f"{devices}, {backend}"
    return f"{devices}, shared by {num_ranks} ranks, whose messages go through host memory (gloo)"


def check_program(device: RankDevice, program: "Program") -> None:
    """Raises UserError for programs that cannot run with shared devices."""
    for call in program.workload.workflow.placed_calls if device.kind == "shared" else ():
        zero = program.placement.layouts[call.name].zero
        if isinstance(call, Train) and zero > 1:
            raise UserError(
                f"{call.name} has ZeRO {zero}, which uses DeepSpeed and needs NCCL or the CPU; with device=shared use "
                "ZeRO 0 or 1"
            )


def assign(visible: Sequence[Sequence[str]]) -> list[int] | None:
    """Assigns a different device to each rank of a node, as an index into the devices visible to it; None if
    impossible.

    Ranks may see all devices of the node, or one each if the launcher bound them, or anything in between.
    """
    owner: dict[str, int] = {}

    def match(rank: int, tried: set[str]) -> bool:
        """Finds a device for the rank, moving other ranks to other devices if necessary (augmenting paths)."""
        for device in sorted(visible[rank], key=lambda device: device in owner):
            if device not in tried:
                tried.add(device)
                if device not in owner or match(owner[device], tried):
                    owner[device] = rank
                    return True
        return False

    if not all(match(rank, set()) for rank in range(len(visible))):
        return None
    own = {rank: device for device, rank in owner.items()}
    return [list(devices).index(own[rank]) for rank, devices in enumerate(visible)]
