"""Process groups for ranks that share a device: tensors are sent through host memory, by gloo.

NCCL does not support two ranks on one device, and gloo's support for device tensors is unreliable. Here a tensor is
copied to the host when an operation begins, and back when the caller waits for it. This is slow and meant for
developing strategies on a workstation (`device=shared`). CPU tensors go to gloo directly.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "host"


class HostWork(dist.Work):
    """A running operation: the first `wait` calls `finish`."""

    def __init__(self, finish: Callable[[], None]):
        super().__init__()
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._finish is not None:
            self._finish()
        self._finish = None
        return True


class HostGroup(dist.ProcessGroup):
    """The operations of a process group that this program and DeepSpeed use. `run` determines when an operation is
    carried out; a subclass may override it (tests/ordered_group.py)."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self.inner = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._rank, self._size, self.timeout = rank, size, timeout

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return BACKEND

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def run(self, what: str, start: Callable[[], dist.Work], finish: Callable[[], None]) -> dist.Work:
        """Runs a gloo operation.

        what: its name, for errors.
        start: begins it.
        finish: called after it.
        """
        work = start()

        def end() -> None:
            work.wait()
            finish()

        return HostWork(end)

    def _operation(
        self, what: str, begin: Callable[..., dist.Work], read: Sequence[Tensor], written: Sequence[Tensor]
    ) -> dist.Work:
        """Runs an operation on host copies of the tensors that it reads or writes: begin(read copies, written copies).
        A tensor may be in both lists."""
        hosts = {id(tensor): _on_host(tensor, copied=True) for tensor in read}
        for tensor in written:
            hosts.setdefault(id(tensor), _on_host(tensor, copied=False))

        def finish() -> None:
            for tensor in written:
                if hosts[id(tensor)] is not tensor:
                    tensor.copy_(hosts[id(tensor)])

        return self.run(
            what, lambda: begin([hosts[id(tensor)] for tensor in read], [hosts[id(t)] for t in written]), finish
        )

    # ---- collectives ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors, opts=None):
        opts = opts or dist.AllreduceOptions()
        return self._operation("all_reduce", lambda read, _: self.inner.allreduce(read, opts), tensors, tensors)

    def broadcast(self, tensors, opts=None):
        opts = opts or dist.BroadcastOptions()
        mine = opts.rootRank == self._rank
        return self._operation(
            "broadcast",
            lambda read, written: self.inner.broadcast(read or written, opts),
            tensors if mine else (),
            () if mine else tensors,
        )

    def allgather(self, outputs, inputs, opts=None):
        (parts,) = outputs
        return self._operation("all_gather", lambda read, written: self.inner.allgather([written], read), inputs, parts)

    def all_gather_single(self, output, input, opts=None):
        return self.allgather([output.chunk(self._size)], [input])

    def reduce_scatter(self, outputs, inputs, opts=None):
        opts = opts or dist.ReduceScatterOptions()
        (parts,) = inputs
        return self._operation(
            "reduce_scatter", lambda read, written: self.inner.reduce_scatter(written, [read], opts), parts, outputs
        )

    def reduce_scatter_single(self, output, input, opts=None):
        return self.reduce_scatter([output], [input.chunk(self._size)], opts)

    def all_to_all_single(self, output, input, output_sizes, input_sizes, opts=None):
        return self._operation(
            "all_to_all",
            lambda read, written: self.inner.alltoall_base(*written, *read, output_sizes, input_sizes),
            [input],
            [output],
        )

    # the names before torch 2.13
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    alltoall_base = all_to_all_single

    def barrier(self, opts=None):
        return self.run("barrier", self.inner.barrier, lambda: None)

    # ---- messages ---------------------------------------------------------------------------------------------------

    def send(self, tensors, peer, tag):
        return self._operation(f"send to {peer}", lambda read, _: self.inner.send(read, peer, tag), tensors, ())

    def recv(self, tensors, peer, tag):
        return self._operation(
            f"receive from {peer}", lambda _, written: self.inner.recv(written, peer, tag), (), tensors
        )


def _on_host(tensor: Tensor, *, copied: bool) -> Tensor:
    """Returns the tensor itself if it is in host memory; else a host tensor of the same shape, with its values if
    `copied`."""
    if tensor.device.type == "cpu":
        return tensor
    return tensor.cpu().contiguous() if copied else torch.empty(tensor.shape, dtype=tensor.dtype)


def register() -> None:
    """Registers the backend with torch.distributed."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, HostGroup, devices=["cpu", "cuda"])
