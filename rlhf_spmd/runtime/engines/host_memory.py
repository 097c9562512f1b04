"""Host memory for what a device need not hold all the time: pinned, if the device is a GPU; and visits of it there."""

import functools
import mmap
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.errors import UserError

PORTABLE = 1  # cudaHostRegisterPortable


def host_zeros(owner: Any, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros in host memory that a device reads and writes, [numel], pinned until `owner` ends.

    They take the memory of their numbers: what torch's allocator pins is rounded up to a power of two (pytorch's issue
    150517). Raises UserError.
    """
    if device.type == "cpu":
        return torch.zeros(numel, dtype=dtype)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, numel * dtype.itemsize, flags=private)  # whole pages: none can be pinned twice
    flat = torch.frombuffer(memory, dtype=dtype)
    error = int(torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), flat.nbytes, PORTABLE))
    if error:
        raise UserError(
            f"the driver cannot pin {flat.nbytes / 2**30:.1f} GiB of host memory for what is offloaded "
            f"(cudaHostRegister: error {error}): drop the strategy's options for offloading, or start fewer ranks here"
        )
    weakref.finalize(owner, unpin, flat).atexit = False
    return flat


def unpin(flat: Tensor) -> None:
    """Undoes what pinned the memory of `host_zeros`, before it is freed."""
    torch.cuda.cudart().cudaHostUnregister(flat.data_ptr())


@functools.cache
def copy_streams(device: torch.device) -> tuple[torch.cuda.Stream | None, torch.cuda.Stream | None]:
    """Returns a stream for copies to a device and one for copies from it, beside its computation; None on a CPU. They
    are made once: torch has 32, which NCCL's communicators would soon share with them."""
    return (torch.cuda.Stream(device), torch.cuda.Stream(device)) if device.type == "cuda" else (None, None)


def visits(parts: Sequence[Sequence[Tensor]], device: torch.device) -> Iterator[list[Tensor]]:
    """Yields copies of parts of tensors on a device, one part after another; what is done to a copy is copied back.

    The next part comes, and the one before goes, while a part is there; so two have memory on the device.

    parts: [part][tensor], in host memory; those of a part are equally long.
    """
    size = max(len(tensor) for part in parts for tensor in part)
    rooms = [[torch.empty(size, dtype=tensor.dtype, device=device) for tensor in parts[0]] for _ in range(2)]
    main = torch.cuda.current_stream(device) if device.type == "cuda" else None
    coming, going = copy_streams(device)

    def come(number: int) -> list[Tensor]:
        copies = [room[: len(tensor)] for room, tensor in zip(rooms[number % 2], parts[number], strict=True)]
        _follow(coming, going)  # the part that had this room
        _copy(parts[number], copies, coming)
        return copies

    _follow(coming, main)  # which may still use the memory for something else
    there = come(0)
    for number, part in enumerate(parts):
        copies = there
        _follow(main, coming)
        if number + 1 < len(parts):
            there = come(number + 1)
        yield copies
        _follow(going, main)
        _copy(copies, part, going)
    _follow(main, going)


def _follow(later: torch.cuda.Stream | None, earlier: torch.cuda.Stream | None) -> None:
    """Lets what comes next in a stream begin after what is in another one so far."""
    if later is not None:
        later.wait_stream(earlier)


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor], stream: torch.cuda.Stream | None) -> None:
    with torch.cuda.stream(stream):
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
