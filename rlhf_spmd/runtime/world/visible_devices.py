"""The GPUs that torch sees in this process (CUDA and ROCm), and evidence of GPUs that torch does not see.

torch takes seconds to import, so it is only asked if there is evidence of a GPU: a driver's device file, or a variable
by which a launcher assigns GPUs. Evidence without a visible device is an error unless device=cpu is chosen, so nothing
runs on the CPU because of a broken driver, container or build of torch.
"""

import glob
import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_spmd.errors import UserError

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


def threads_wanted(environ: Mapping[str, str]) -> int | None:
    """Returns the threads that OMP_NUM_THREADS asks for: of a list, which OpenMP allows for nested regions, the first
    number. None if it is not set or blank. Raises UserError."""
    text = environ.get(THREADS, "")
    if not text.strip():
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,9}", part) and 0 < int(part) <= MOST_THREADS for part in parts):
        raise UserError(
            f"{THREADS}={text!r}: give the number of threads of each rank, from 1 to {MOST_THREADS} (of a list as in "
            f"{THREADS}=4,1 the first number counts), or unset it"
        )
    return int(parts[0])


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
    seen = visible_devices(torch, host)
    hinted = f"{host} has {', '.join(evidence)}, but " if evidence else ""
    text = f"{hinted}torch sees no device on {host} ({build_of(torch)})"
    return {"seen": [asdict(device) for device in seen], "unseen": "" if seen else text}


def parse_reports(reports: Sequence[Mapping[str, Any]]) -> tuple[list[list[VisibleDevice]], str]:
    """Reads, from the reports of all ranks, the devices that each sees, and evidence of devices on a rank that sees
    none."""
    unseen = next((report["unseen"] for report in reports if report["unseen"]), "")
    return [[VisibleDevice(**device) for device in report["seen"]] for report in reports], unseen


def visible_devices(torch: Any, host: str) -> list[VisibleDevice]:
    """Returns the devices that torch sees, in order."""
    devices = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        devices.append(VisibleDevice(f"{host} {getattr(about, 'uuid', index)}", about.name, about.total_memory))
    return devices


def hints(environ: Mapping[str, str]) -> list[str]:
    """Returns evidence that this process has GPUs; empty if they are hidden from it."""
    hidden = environ.get(VISIBLE, "all").strip() in NOTHING
    amd_hidden = any(environ.get(name, "all").strip() in NOTHING for name in AMD_VISIBLE)
    if hidden:
        return []
    evidence = [f"{VISIBLE}={environ[VISIBLE].strip()}"] if VISIBLE in environ else []
    evidence += [path for pattern in DRIVER_FILES for path in sorted(glob.glob(pattern))]
    if not amd_hidden:
        evidence += [f"{name}={environ[name].strip()}" for name in AMD_VISIBLE if name in environ]
        evidence += glob.glob(AMD_FILE)
    if evidence or not amd_hidden:
        evidence += [f"{name}={environ[name]}" for name in ALLOCATED if environ.get(name, "").strip() not in ("", "0")]
    return evidence


def build_of(torch: Any) -> str:
    """Names, for messages, the platform that torch was built for."""
    version = torch.version
    built = f"ROCm {version.hip}" if version.hip else f"CUDA {version.cuda}" if version.cuda else "CPUs alone"
    return f"torch {torch.__version__} is built for {built}"
