"""Sends and receives rows and weights between calls: starts a transfer (`Post`), and waits for it (`Wait`).

Rows through host memory are copied to it when they are posted, and from it when they are waited for, on the stream of
the call that reads them. Until then a receive is none of the device's business.
"""

import torch
import torch.distributed as dist

from rlhf_spmd.plan.layout import HOST
from rlhf_spmd.plan.program.instructions import Message, Program, Transfer
from rlhf_spmd.runtime.execute.iteration import Iteration
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.weights.weight_mover import Mover
from rlhf_spmd.runtime.weights.weight_sync import mover_of

MAX_TENSORS = 100_000  # of one message: keeps the tags of different transfers apart
MAX_TRANSFERS = 20_000  # under way at once; a tag is a 32-bit number


class Transfers:
    """This rank's part of the transfers of a program, and what it has sent."""

    def __init__(self, job: Job, program: Program):
        self.program, self.world, self.models = program, job.world, job.models
        # transfer -> its operations, the buffers that rows arrive in, and those that they leave from
        self.pending: dict[int, tuple[list[dist.Work], list[tuple[Message, torch.Tensor]], list[torch.Tensor]]] = {}
        self.movers: dict[int, Mover] = {}  # transfer of weights -> this rank's part of it
        self.num_bytes_sent, self.num_messages_sent = 0, 0
        name = self.program.host_group
        self.host: dist.ProcessGroup | None = None if name is None else self.world.group(name)

    def post(self, number: int, data: Iteration) -> None:
        """Starts all sends and receives of this rank at once; both ends list them in the transfer's order."""
        transfer, rank = self.program.transfers[number], self.world.rank
        tag = number % MAX_TRANSFERS * MAX_TENSORS  # a pair may exchange several messages
        if transfer.model is not None:
            self.movers[number] = mover_of(transfer, self.models, tag_base=tag)
            self.movers[number].start()
            return
        through_host = transfer.communicator == HOST
        group = self.host if through_host else None
        operations, arriving, leaving = [], [], []
        for place, message in enumerate(transfer.messages):
            if rank == message.source:
                words = self._packed(transfer, message, data)
                if through_host:
                    words = self._buffer(len(words), through_host).copy_(words)  # waits for the stream that makes them
                leaving.append(words)
                self.num_bytes_sent += words.nbytes
                self.num_messages_sent += 1
                operations.append(dist.P2POp(dist.isend, words, message.destination, group=group, tag=tag + place))
                assert words.nbytes == message.num_bytes, (transfer.what, message)
            elif rank == message.destination:
                words = self._buffer(message.num_bytes // 4, through_host)
                arriving.append((message, words))
                operations.append(dist.P2POp(dist.irecv, words, message.source, group=group, tag=tag + place))
        self.pending[number] = (dist.batch_isend_irecv(operations), arriving, leaving)

    def _buffer(self, num_words: int, through_host: bool) -> torch.Tensor:
        """A buffer for a message. In host memory it is page-locked, so that copies need no other one."""
        if not through_host:
            return torch.empty(num_words, dtype=torch.int32, device=self.world.device)
        return torch.empty(num_words, dtype=torch.int32, pin_memory=self.world.device.type == "cuda")

    def _packed(self, transfer: Transfer, message: Message, data: Iteration) -> torch.Tensor:
        """The rows of a message as one buffer of 4-byte words, key after key. Contiguous rows of a single key are sent
        from the store itself, because a row never changes once it is made."""
        place = self._rows(transfer, message)
        if not message.keys:
            return torch.zeros(1, dtype=torch.int32, device=self.world.device)  # a notice, made behind the rows
        words = [data.store.at(key, place).contiguous().view(torch.int32).flatten() for key in message.keys]
        return words[0] if len(words) == 1 else torch.cat(words)

    def _rows(self, transfer: Transfer, message: Message) -> tuple[slice, slice]:
        rows = self.program.mini_batches_of(transfer)
        return slice(rows.start, rows.stop), slice(message.columns.start, message.columns.stop)

    def wait(self, number: int, data: Iteration) -> None:
        """Waits until the messages of a transfer are sent and received, and stores what arrived."""
        transfer = self.program.transfers[number]
        if transfer.model is not None:
            mover = self.movers.pop(number)
            mover.finish()
            self.num_bytes_sent += mover.num_bytes_sent
            self.num_messages_sent += mover.num_messages_sent
            return
        works, arriving, _ = self.pending.pop(number)
        for work in works:
            work.wait()
        for message, words in arriving:
            self._unpack(transfer, message, words.to(self.world.device, non_blocking=True), data)

    def _unpack(self, transfer: Transfer, message: Message, words: torch.Tensor, data: Iteration) -> None:
        start = 0
        for key in message.keys:
            place = data.store.at(key, self._rows(transfer, message))
            piece = words[start : start + place.numel()].view(place.shape)
            place.copy_(piece.view(place.dtype))
            start += place.numel()
