"""Sends and receives rows and weights between calls: starts a transfer (`Post`), and waits for it (`Wait`)."""

import torch
import torch.distributed as dist

from rlhf_spmd.plan.program.instructions import Message, Transfer
from rlhf_spmd.runtime.execute.iteration import Iteration
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.weights.weight_mover import Mover
from rlhf_spmd.runtime.weights.weight_sync import mover_of

MAX_TENSORS = 100_000  # of one message: keeps the tags of different transfers apart
MAX_TRANSFERS = 20_000  # under way at once; a tag is a 32-bit number


class Transfers:
    """This rank's part of the transfers of a program, and what it has sent."""

    def __init__(self, job: Job):
        self.program, self.world, self.models = job.program, job.world, job.models
        # transfer -> its operations, and the buffers that rows arrive in
        self.pending: dict[int, tuple[list[dist.Work], list[tuple[Message, torch.Tensor]]]] = {}
        self.movers: dict[int, Mover] = {}  # transfer of weights -> this rank's part of it
        self.num_bytes_sent, self.num_messages_sent = 0, 0

    def post(self, number: int, data: Iteration) -> None:
        """Starts all sends and receives of this rank at once; both ends list them in the transfer's order."""
        transfer, rank = self.program.transfers[number], self.world.rank
        tag = number % MAX_TRANSFERS * MAX_TENSORS  # a pair may exchange several messages
        if transfer.model is not None:
            self.movers[number] = mover_of(transfer, self.models, tag_base=tag)
            self.movers[number].start()
            return
        operations, arriving = [], []
        for place, message in enumerate(transfer.messages):
            if rank == message.source:
                words = self._packed(transfer, message, data)
                self.num_bytes_sent += words.nbytes
                self.num_messages_sent += 1
                operations.append(dist.P2POp(dist.isend, words, message.destination, tag=tag + place))
                assert words.nbytes == message.num_bytes, (transfer.what, message)
            elif rank == message.destination:
                words = torch.empty(message.num_bytes // 4, dtype=torch.int32, device=self.world.device)
                arriving.append((message, words))
                operations.append(dist.P2POp(dist.irecv, words, message.source, tag=tag + place))
        self.pending[number] = (dist.batch_isend_irecv(operations), arriving)

    def _packed(self, transfer: Transfer, message: Message, data: Iteration) -> torch.Tensor:
        """The rows of a message as one buffer of 4-byte words, key after key. Contiguous rows of a single key are sent
        from the store itself, because a row never changes once it is made."""
        place = self._rows(transfer, message)
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
        works, arriving = self.pending.pop(number)
        for work in works:
            work.wait()
        for message, words in arriving:
            self._unpack(transfer, message, words, data)

    def _unpack(self, transfer: Transfer, message: Message, words: torch.Tensor, data: Iteration) -> None:
        start = 0
        for key in message.keys:
            place = data.store.at(key, self._rows(transfer, message))
            piece = words[start : start + place.numel()].view(place.shape)
            place.copy_(piece.view(place.dtype))
            start += place.numel()
