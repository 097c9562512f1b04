"""Chooses the device of each rank: its own, one shared with other ranks, or the CPU.

`device=auto` gives each rank its own device, or uses the CPU if no rank sees a device; anything in between is an error,
so nothing runs on the CPU by accident. `cuda` requires devices; `cpu` ignores them. `shared` distributes any number of
ranks over the devices of their node and sends their tensors through host memory (host_group.py): slow, for developing
strategies on a workstation.

torch takes seconds to import, so it is only asked for devices if there is evidence of one: a driver's device file, or a
variable by which a launcher assigns GPUs. Evidence without a visible device is an error unless device=cpu is chosen, so
nothing runs on the CPU because of a broken driver, container or build of torch.
"""

import ctypes
import glob
import importlib.util
import os
import re
import resource
import shutil
import socket
import stat
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.calls import Train
from rlhf_spmd.plan.cluster import device_type_of
from rlhf_spmd.plan.validate import on_gpu_problems

if TYPE_CHECKING:
    from rlhf_spmd.plan.program.instructions import Program


BLOCKING_SYNC = 4  # CU_CTX_SCHED_BLOCKING_SYNC of CUDA's driver
COMPILERS = ("clang", "gcc")  # that Triton looks for if CC names none
KERNELS = ("TRITON_CACHE_DIR", "TRITON_HOME")  # where Triton keeps compiled kernels: the folder, or the one above it
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "shared": "host"}  # of torch.distributed, by kind of device
# Device files of drivers: NVIDIA's, NVIDIA's in the Windows Subsystem for Linux, and AMD's.
DRIVER_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg")
AMD_FILE = "/dev/kfd"
# Set by users and by launchers (by Slurm according to the allocation). ROCm obeys VISIBLE, too.
VISIBLE = "CUDA_VISIBLE_DEVICES"
AMD_VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
ALLOCATED = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "PBS_NGPUS")  # of any vendor
NOTHING = ("", "-1", "NoDevFiles")  # values that hide all devices
THREADS, MOST_THREADS = "OMP_NUM_THREADS", 4096
# of torch's allocator on a device; the last is the documented name, but the others count more
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@dataclass(frozen=True, slots=True)
class VisibleDevice:
    """A device that torch sees. identity: unique to the device, the same in every process."""

    identity: str
    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RankDevice:
    """The device of a rank."""

    kind: str  # cpu, cuda or shared
    index: int | None  # among the devices that this rank sees; None: the CPU
    num_ranks: int  # that compute on the same device, including this rank
    num_devices: int  # of the whole job; the CPUs of a node count as one
    name: str = ""  # of the device, from torch
    num_bytes: int | None = None  # its memory; None: a CPU

    def peak_bytes(self) -> int:
        """Returns the most memory that this process has held: of its GPU, or, without one, of the host."""
        if self.index is None:
            return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        import torch

        return torch.cuda.max_memory_reserved(self.index)


# What a rank sees


def find_devices(wanted: str, host: str, threads: int, num_ranks: int = 1) -> dict[str, Any]:
    """Returns this rank's report to the others: "seen": its devices, in order (fields of VisibleDevice); "unseen": if
    there are none, the evidence of some.

    wanted: the option `device`.
    threads: of torch on this rank.
    num_ranks: of the job.
    """
    evidence = hints(os.environ)
    if wanted == "cpu" or wanted == "auto" and not evidence:
        return {"seen": [], "unseen": ""}
    if num_ranks > 1:  # loading a kernel later may wait for a message posted early
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    torch = import_torch(None, threads)
    seen, version = visible_devices(torch, host), torch.version
    hinted = f"{host} has {', '.join(evidence)}, but " if evidence else ""
    built = f"ROCm {version.hip}" if version.hip else f"CUDA {version.cuda}" if version.cuda else "CPUs alone"
    text = f"{hinted}torch sees no device on {host} (torch {torch.__version__} is built for {built})"
    return {"seen": [asdict(device) for device in seen], "unseen": "" if seen else text}


def visible_devices(torch: Any, host: str) -> list[VisibleDevice]:
    """Returns the devices that torch sees, in order."""
    devices = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        devices.append(VisibleDevice(f"{host} {getattr(about, 'uuid', index)}", about.name, about.total_memory))
    return devices


def hints(environ: Mapping[str, str]) -> list[str]:
    """Returns evidence that this process has GPUs; empty if they are hidden from it."""
    if environ.get(VISIBLE, "all").strip() in NOTHING:
        return []
    amd_hidden = any(environ.get(name, "all").strip() in NOTHING for name in AMD_VISIBLE)
    evidence = [f"{VISIBLE}={environ[VISIBLE].strip()}"] if VISIBLE in environ else []
    if not amd_hidden:
        evidence += [f"{name}={environ[name].strip()}" for name in AMD_VISIBLE if name in environ]
        evidence += [f"{name}={environ[name]}" for name in ALLOCATED if environ.get(name, "").strip() not in ("", "0")]
    files = DRIVER_FILES if amd_hidden else (*DRIVER_FILES, AMD_FILE)
    return evidence + [path for pattern in files for path in sorted(glob.glob(pattern))]


def import_torch(threads: int | None, share: int) -> Any:
    """Imports torch with `threads` threads; None: OMP_NUM_THREADS, or `share`, this rank's fair share of the cores."""
    set_defaults(os.environ)
    threads = threads or threads_wanted(os.environ) or share
    os.environ[THREADS] = str(threads)
    try:
        import torch
    except ValueError as error:  # of a variable of its own, e.g. TORCH_DISTRIBUTED_DEBUG
        raise UserError(f"torch can't be loaded: {error} Set the variable to one of its values, or unset it") from error
    torch.set_num_threads(threads)
    return torch


def set_defaults(environ: MutableMapping[str, str]) -> None:
    """Sets what torch, CUDA and NCCL read when they start, where the user has not set it."""
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # The maximum of hardware queues: a message of one communicator must not queue behind another's.
    environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # Memory returns to the device page by page, even if other tensors are adjacent.
    if not any(name in environ for name in ALLOCATOR):
        environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    # Else NCCL registers the tensors of collectives in a captured graph (cuda_graphs.py), which may lie on pages of
    # several mappings in such a segment: an illegal access to memory, also of Megatron-LM (issue 5474).
    environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    # Else NCCL's threads bear this program's name, and what they spin counts as work (processes.py).
    environ.setdefault("NCCL_SET_THREAD_NAME", "1")


def threads_wanted(environ: Mapping[str, str]) -> int | None:
    """Returns the threads that OMP_NUM_THREADS asks for: of a list, which OpenMP allows for nested regions, the first
    number. None if it is not set or blank. Raises UserError."""
    text = environ.get(THREADS, "").strip()
    first = text.partition(",")[0].strip()
    if text and not (re.fullmatch("[0-9]{1,8}", first) and 0 < int(first) <= MOST_THREADS):
        raise UserError(f"{THREADS}={text!r}: give the threads of each rank, from 1 to {MOST_THREADS}, or unset it")
    return int(first) if text else None


# What a rank gets


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
    for ranks in ranks_of.values():
        host, of_rank = hosts[ranks[0]], [[device.identity for device in visible[rank]] for rank in ranks]
        if not any(of_rank) or wanted == "shared" and not all(of_rank):
            raise UserError(
                f"device={wanted}, but a rank on {host} sees no device{f' ({unseen})' if unseen else ''}: check with "
                "nvidia-smi or rocm-smi which devices the driver finds there, and whether CUDA_VISIBLE_DEVICES or "
                "ROCR_VISIBLE_DEVICES hides them; device=cpu runs on the CPU"
            )
        indices = assign(of_rank, is_shared=wanted == "shared")
        if indices is None:
            num = len({identity for identities in of_rank for identity in identities})
            raise UserError(
                f"{host} has {len(ranks)} ranks and {num} devices for them; start one rank per device, or choose "
                "device=shared (ranks share devices, through host memory: slow, for development) or device=cpu"
            )
        index_of |= dict(zip(ranks, indices, strict=True))
    own = [visible[rank][index_of[rank]] for rank in range(len(nodes))]
    kind, num_ranks = "shared" if wanted == "shared" else "cuda", Counter(device.identity for device in own)
    return [
        RankDevice(kind, index_of[rank], num_ranks[device.identity], len(num_ranks), device.name, device.num_bytes)
        for rank, device in enumerate(own)
    ]


def assign(visible: Sequence[Sequence[str]], *, is_shared: bool = False) -> list[int] | None:
    """Assigns a device to each rank of a node, as an index into the devices visible to it; None if each must have its
    own and that is impossible.

    Ranks may see all devices of the node, or one each if the launcher bound them. Ranks that see fewer choose first.
    """
    taken: Counter[str] = Counter()
    indices = [0] * len(visible)
    for rank in sorted(range(len(visible)), key=lambda rank: len(visible[rank])):
        identities = visible[rank]
        if not identities:
            return None
        indices[rank] = min(range(len(identities)), key=lambda index: taken[identities[index]])
        taken[identities[indices[rank]]] += 1
    return indices if is_shared or max(taken.values()) == 1 else None


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
    # Else a product of few rows, as in decoding, sums its parts in bfloat16, and one of many rows, as in training, not.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return partial(torch.cuda.memory_reserved, device.index)


def lack_for_kernels(environ: Mapping[str, str]) -> str:
    """Returns what is missing to compile GPU kernels, and the fix; empty if nothing is: Triton and, for the code by
    which it launches each kernel for the first time, a C compiler and Python's headers. Without them the first
    iteration would fail."""
    if importlib.util.find_spec("triton") is None:
        return "whose kernels need the package triton: install the version that torch requires (pip show torch)"
    names = (environ["CC"],) if "CC" in environ else COMPILERS
    scheme = sysconfig.get_default_scheme()  # Debian's own one names a folder that need not exist
    include = sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
    if not any(map(shutil.which, names)) or not os.path.isfile(os.path.join(include, "Python.h")):
        return (
            f"whose kernels Triton launches by code that it compiles with {' or '.join(names)} and {include}/Python.h: "
            f"install both on {socket.gethostname()} (gcc, python3-dev), or name a compiler in CC"
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
        about = os.lstat(path)
        if stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022:
            environ[KERNELS[0]] = path  # nobody else may put code there


def sleep_while_waiting(index: int) -> bool:
    """Makes this process sleep while it waits for a device; call it before using the device -> whether it succeeded.

    CUDA spins by default, so a rank stuck in a wait for a message would look busy to the watch. With sleep, a wait
    takes some microseconds longer and leaves the core to others.
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
    """Raises UserError for programs that cannot run on GPUs, or with shared ones."""
    if device.kind != "cpu" and (why := "; ".join(on_gpu_problems(program.workload))):
        raise UserError(why)
    for call in program.workload.workflow.placed_calls if device.kind == "shared" else ():
        zero = program.placement.layouts[call.name].zero
        if isinstance(call, Train) and zero == 3:
            raise UserError(
                f"{call.name} has ZeRO {zero}, which uses DeepSpeed and needs NCCL or the CPU; with device=shared use "
                "ZeRO 0, 1 or 2"
            )
