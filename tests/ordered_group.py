"""A stand-in for NCCL over gloo: each communicator of a rank carries out its operations strictly in the order in which
they were queued.

What can hang on NCCL hangs here, without a GPU: one worker thread per rank and group; a message completes only when its
receive has begun; what is batched travels side by side, everything else one after another; tags mean nothing; the first
message of a pair blocks the host until the peer's host comes to it, too. An operation that takes too long ends with an
error that names it.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlhf_spmd.runtime.world.host_group import HostGroup

BACKEND = "ordered"
DATA, READY, HELLO = 0, 1, 2  # tags of gloo
_batch_isend_irecv = dist.batch_isend_irecv  # torch's own


class OrderedWork(dist.Work):
    def __init__(self, name: str, timeout: timedelta):
        super().__init__()
        self.name, self.timeout = name, timeout
        self.over, self.error = threading.Event(), None

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = (timeout or self.timeout).total_seconds()
        if not self.over.wait(seconds or None):
            raise RuntimeError(f"Timed out after {seconds:g} s: {self.name}")
        if self.error is not None:
            raise RuntimeError(f"{self.name}: {self.error}") from self.error
        return True

    def is_completed(self) -> bool:
        return self.over.is_set()


class OrderedGroup(HostGroup):
    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta):
        super().__init__(store, rank, size, timeout)
        self._line: queue.SimpleQueue = queue.SimpleQueue()
        self._count = 0
        self._known: set[int] = set()  # peers that are connected
        self._batch: list[tuple[str, Callable[[], None]]] | None = None
        threading.Thread(target=self._carry_out, daemon=True).start()

    def getBackendName(self) -> str:
        return BACKEND

    def run(self, what: str, start: Callable[[], dist.Work], finish: Callable[[], None]) -> dist.Work:
        def whole() -> None:
            start().wait()
            finish()

        return self._queued(what, whole)

    def send(self, tensors, peer, tag):
        def whole() -> None:
            self.inner.recv([_byte()], peer, READY).wait()
            self.inner.send(tensors, peer, DATA).wait()

        return self._message(f"send to {peer}", peer, whole)

    def recv(self, tensors, peer, tag):
        def whole() -> None:
            arriving = self.inner.recv(tensors, peer, DATA)
            self.inner.send([_byte()], peer, READY).wait()
            arriving.wait()

        return self._message(f"receive from {peer}", peer, whole)

    def _message(self, what: str, peer: int, whole: Callable[[], None]) -> dist.Work | None:
        if peer not in self._known:
            hello = self.inner.send([_byte()], peer, HELLO)
            self.inner.recv([_byte()], peer, HELLO).wait()
            hello.wait()
            self._known.add(peer)
        if self._batch is None:
            return self._queued(what, whole)
        self._batch.append((what, whole))
        return None

    def batched(self, post: Callable[[], None]) -> dist.Work:
        """Returns messages that `post` queues, as one operation."""
        self._batch = []
        post()
        batch, self._batch = self._batch, None

        lines: dict[str, list[Callable[[], None]]] = {}  # messages of one peer and direction keep their order
        for what, one in batch:
            lines.setdefault(what, []).append(one)

        def whole() -> None:
            errors: list[Exception] = []

            def guarded(line: list[Callable[[], None]]) -> None:
                try:
                    with torch.inference_mode():
                        for one in line:
                            one()
                except Exception as error:
                    errors.append(error)

            threads = [threading.Thread(target=guarded, args=(line,), daemon=True) for line in lines.values()]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if errors:
                raise errors[0]

        return self._queued(" and ".join(lines), whole)

    def _queued(self, what: str, whole: Callable[[], None]) -> OrderedWork:
        self._count += 1
        ranks = dist.get_process_group_ranks(self) if self in dist.distributed_c10d._world.pg_group_ranks else "?"
        name = f"operation {self._count} of ranks {ranks} on rank {self._rank} of them, {what}"
        work = OrderedWork(name, self.timeout)
        self._line.put((work, whole))
        return work

    def _carry_out(self) -> None:
        while True:
            work, whole = self._line.get()
            try:
                with torch.inference_mode():  # a thread has its own mode, and some tensors are the engine's
                    whole()
            except Exception as error:
                work.error = error
            work.over.set()
            del work, whole  # and the tensors of the last operation


def _byte() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8)


def batch_isend_irecv(operations: Sequence[dist.P2POp]) -> list[dist.Work]:
    """Posts as torch does where a backend coalesces: one operation of the communicator, and one Work."""
    group = operations[0].group or dist.group.WORLD
    if not isinstance(group, OrderedGroup):
        return _batch_isend_irecv(operations)
    assert all((operation.group or dist.group.WORLD) is group for operation in operations), "a batch of several groups"

    def post() -> None:
        for operation in operations:
            end = "group_dst" if operation.op is dist.isend else "group_src"
            operation.op(operation.tensor, group=group, tag=operation.tag, **{end: operation.group_peer})

    return [group.batched(post)]
