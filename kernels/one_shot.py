"""Sums of decode steps over GPUs that NVLink connects: each rank reads the parts of all ranks and adds them.

For a small message that takes less time than NCCL's steps. The kernel is torch's (torch.ops.symm_mem): it adds in the
order of the ranks and rounds after each, so that all ranks have the same bits. A part is copied to the memory that the
ranks share by a kernel before: torch's operator that copies in the same kernel tells the other ranks that their part is
there before all of its threads have written it (torch's source in 2026).

Ranks use it if VARIABLE asks for it, if all of them can, and if a first sum has the bits of `in_order`; else, and for
larger messages, NCCL.
"""

# R ranks, N numbers of a message

import functools
import itertools
import os
import socket
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.kernels.collectives import all_gather

VARIABLE = "RLHF_SPMD_ONE_SHOT"  # 1: in one shot, which no GPU has run yet; else NCCL alone
READ_BYTES = 2**21  # that a rank reads for the largest message
VECTOR_BYTES = 16  # that a thread reads at once
DTYPES, TEXT_BYTES = (torch.float32, torch.bfloat16), 200
NO_LINKS = "not all GPUs are connected by NVLink"

_SHARED: dict[str, Tensor] = {}  # by a group's name: this rank's bytes of the memory that its ranks share
_DESCRIPTIONS: dict[str, str] = {}  # by a group's name, how it sums


def description() -> str:
    """Returns how the groups of this process sum, for people; empty if it has none."""
    return "; ".join(dict.fromkeys(_DESCRIPTIONS.values()))


def connect(group: dist.ProcessGroup | None) -> None:
    """Finds out, once, how the ranks of a group sum, and connects them. Collective, of GPUs; it never fails."""
    if group is not None and dist.get_backend(group) == "nccl" and group.group_name not in _DESCRIPTIONS:
        _connect(group)


def _connect(group: dist.ProcessGroup) -> None:
    steps: tuple[Callable[[dist.ProcessGroup], str], ...] = (_lack, _allocated, _joined, _checked)
    why = next(filter(None, (_agreed(step, group) for step in steps)), "")
    _DESCRIPTIONS[group.group_name] = f"NCCL ({why})" if why else "in one shot over NVLink, larger ones by NCCL"
    if why:
        _SHARED.pop(group.group_name, None)


def sum_in_place(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Sums a small x over the ranks of a connected group -> whether it has; all ranks decide alike. In a CUDA graph,
    too."""
    shared = _SHARED.get(group.group_name) if x.is_cuda else None
    if shared is None or not fits(x, len(shared)):
        return False
    part = shared[: x.nbytes].view(x.dtype).view(x.shape)
    part.copy_(x)
    torch.ops.symm_mem.one_shot_all_reduce_out(part, "sum", group.group_name, x)
    return True


def fits(x: Tensor, num_bytes: int) -> bool:
    """Returns whether the kernel takes a message. num_bytes: of the shared memory."""
    begins = x.storage_offset() * x.itemsize
    whole = not x.nbytes % VECTOR_BYTES and not begins % VECTOR_BYTES
    return x.dtype in DTYPES and x.is_contiguous() and whole and 0 < x.nbytes <= num_bytes


def in_order(parts_RN: Sequence[Tensor]) -> Tensor:
    """Adds the ranks' parts as the kernel does."""
    return functools.reduce(torch.add, parts_RN)


def lack(places: Sequence[tuple[str, int]], links: Sequence[Sequence[int]]) -> str:
    """Returns why ranks can't read each other's memory; empty if they can.

    places: host and device of each rank.
    links: number of NVLinks between each two devices.
    """
    devices = [device for _, device in places]
    if len({host for host, _ in places}) > 1:
        return "the ranks are on several hosts"
    if len({*devices}) < len(devices):
        return "each rank sees one GPU alone"
    connected = all(links[one][other] for one, other in itertools.permutations(devices, 2))
    return "" if connected else NO_LINKS


def _agreed(step: Callable[[dist.ProcessGroup], str], group: dist.ProcessGroup) -> str:
    """Takes a step on all ranks -> why it is not possible on one of them."""
    try:
        why = step(group)
    except Exception as error:  # of torch or the driver, whatever they raise: NCCL can do without them
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return next(filter(None, _gathered(why, group)), "")


def _gathered(text: str, group: dist.ProcessGroup) -> list[str]:
    """Returns the beginning of every rank's text."""
    mine = torch.tensor([*text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES)], dtype=torch.uint8, device=_device(group))
    of_ranks = mine.new_empty(group.size() * TEXT_BYTES)
    all_gather(of_ranks, mine, group=group)
    return [bytes(one.tolist()).decode(errors="replace").strip() for one in of_ranks.view(-1, TEXT_BYTES)]


def _device(group: dist.ProcessGroup) -> torch.device:
    has_gpus = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if has_gpus else torch.device("cpu")


def _lack(group: dist.ProcessGroup) -> str:
    places = [text.split() for text in _gathered(f"{_device(group).index or 0} {socket.gethostname()}", group)]
    if os.environ.get(VARIABLE) != "1":
        return f"{VARIABLE}=1 is not set"
    links = torch._C._distributed_c10d._detect_dma_connectivity(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix
    return lack([(host, int(device)) for device, host in places], links)


def _allocated(group: dist.ProcessGroup) -> str:
    size = READ_BYTES // group.size() // VECTOR_BYTES * VECTOR_BYTES
    memory = torch._C._distributed_c10d._SymmetricMemory  # `empty` has a pool, which may refuse expandable segments
    _SHARED[group.group_name] = memory.empty_strided_p2p((size,), (1,), torch.uint8, _device(group), group.group_name)
    return ""


def _joined(group: dist.ProcessGroup) -> str:
    torch._C._distributed_c10d._SymmetricMemory.rendezvous(_SHARED[group.group_name], group.group_name)
    return ""


def _checked(group: dist.ProcessGroup) -> str:
    """Compares sums that use all shared memory with the same numbers added by torch."""
    shared = _SHARED[group.group_name]
    for dtype in DTYPES:
        numbers_N = torch.arange(shared.nbytes // dtype.itemsize, device=shared.device)
        x_N = (((numbers_N * (2 * group.rank() + 3)) % 251 - 125) / 7).to(dtype)
        parts_RN = x_N.new_empty(group.size(), len(x_N))
        all_gather(parts_RN.view(-1), x_N, group=group)
        if not sum_in_place(x_N, group) or not torch.equal(x_N, in_order(parts_RN.unbind())):
            return "its sums are wrong here"
    return ""
