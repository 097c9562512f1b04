"""Backends that tests/mpi may use instead of gloo: a stand-in for NCCL, or the one for ranks that share a device, which
sends through host memory. In both, weights travel in chains, as on a GPU: the control words for shared memory
(runtime/weights/shared_memory.py) are for gloo only, which keeps no order.
"""

import torch
import torch.distributed as dist

from rlhf_spmd.runtime.weights import shared_memory
from rlhf_spmd.runtime.world import devices, host_group
from tests import ordered_group


def install(name: str) -> None:
    """Makes every process group of this process use that backend from now on."""
    shared_memory.SHARED_MEMORY = ""
    devices.BACKENDS["cpu"] = name
    if name == "ordered":
        dist.Backend.register_backend(name, ordered_group.OrderedGroup, devices=["cpu"])
        dist.batch_isend_irecv = ordered_group.batch_isend_irecv
    else:
        host_group.register()
        host_group._on_host = _copied


def _copied(tensor: torch.Tensor, *, copied: bool) -> torch.Tensor:
    """Copies the tensor as if it lay on a device."""
    return tensor.detach().clone() if copied else torch.full_like(tensor, 77)
