"""Which GPUs this process sees, as torch finds them (CUDA and ROCm), and what hints at GPUs that torch does not find.

torch takes seconds to import, so it is asked only where something hints at a GPU: a driver's device file, or a variable
by which a launcher gives GPUs to a process. A hint without a device is an error unless device=cpu is chosen: nothing
runs on the CPU because a driver, a container or a build of torch is not as it was meant to be.
"""

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# What a driver leaves where there is hardware: NVIDIA's, AMD's, and NVIDIA's under Windows' subsystem for Linux.
DRIVER_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg")
AMD_FILE = "/dev/kfd"
# Set by users and by launchers (Slurm sets them by what was allocated). ROCm obeys the first one, too.
VISIBLE = "CUDA_VISIBLE_DEVICES"
AMD_VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
ALLOCATED = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "PBS_NGPUS")  # whoever made them
NOTHING = ("", "-1", "NoDevFiles")  # values by which all devices are hidden


@dataclass(frozen=True, slots=True)
class Seen:
    """A device that torch sees. identity: the same for every process that sees it, another for every other device."""

    identity: str
    name: str
    num_bytes: int


def import_torch(threads: int | None, share: int) -> Any:
    """torch with so many threads; by default OMP_NUM_THREADS, or `share`, this rank's fair share of the cores."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # As many hardware queues as there may be: a message of one communicator must not stand behind another's.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # Memory goes back to the device page by page, although other tensors lie beside it.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if threads is not None or "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(threads or share)
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return torch


def look(wanted: str, host: str, threads: int, num_ranks: int = 1) -> dict[str, Any]:
    """What this rank tells the others: under "seen" the devices that it may use, in order (fields of Seen), and under
    "unseen", if there are none, what hints at some. wanted: the option `device`; threads: of torch on this rank;
    num_ranks: of the job."""
    found = hints(os.environ)
    if wanted == "cpu" or wanted == "auto" and not found:
        return {"seen": [], "unseen": ""}
    if num_ranks > 1:  # to load a kernel later may wait for a message that has been posted early
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    torch = import_torch(None, threads)
    seen = visible_devices(torch, host)
    hinted = f"{host} has {', '.join(found)}, but " if found else ""
    text = f"{hinted}torch sees no device on {host} ({build_of(torch)})"
    return {"seen": [asdict(device) for device in seen], "unseen": "" if seen else text}


def heard(everyone: Sequence[Mapping[str, Any]]) -> tuple[list[list[Seen]], str]:
    """What all ranks told: the devices that each sees, and what hints at devices where a rank sees none."""
    unseen = next((one["unseen"] for one in everyone if one["unseen"]), "")
    return [[Seen(**device) for device in one["seen"]] for one in everyone], unseen


def visible_devices(torch: Any, host: str) -> list[Seen]:
    """The devices that torch sees, in order."""
    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found.append(Seen(f"{host} {getattr(about, 'uuid', index)}", about.name, about.total_memory))
    return found


def hints(environ: Mapping[str, str]) -> list[str]:
    """What says that this process has GPUs; nothing where they are hidden from it."""
    hidden = environ.get(VISIBLE, "all").strip() in NOTHING
    amd_hidden = any(environ.get(name, "all").strip() in NOTHING for name in AMD_VISIBLE)
    if hidden:
        return []
    found = [f"{VISIBLE}={environ[VISIBLE].strip()}"] if VISIBLE in environ else []
    found += [path for pattern in DRIVER_FILES for path in sorted(glob.glob(pattern))]
    if not amd_hidden:
        found += [f"{name}={environ[name].strip()}" for name in AMD_VISIBLE if name in environ]
        found += glob.glob(AMD_FILE)
    if found or not amd_hidden:
        found += [f"{name}={environ[name]}" for name in ALLOCATED if environ.get(name, "").strip() not in ("", "0")]
    return found


def build_of(torch: Any) -> str:
    """What torch was built for, for messages."""
    version = torch.version
    built = f"ROCm {version.hip}" if version.hip else f"CUDA {version.cuda}" if version.cuda else "CPUs alone"
    return f"torch {torch.__version__} is built for {built}"
