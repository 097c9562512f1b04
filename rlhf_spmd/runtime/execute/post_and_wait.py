"""Sends and receives rows and weights between calls: starts a transfer (`Post`), and waits for it (`Wait`).

Rows through host memory are copied to it when they are posted, and from it when they are waited for, on the stream of
the call that reads them. Until then a receive is none of the device's business.
"""

from collections import Counter

import torch
import torch.distributed as dist

from rlhf_spmd.plan.layout import HOST
from rlhf_spmd.plan.program.instructions import Message, Post, Program, Transfer, Wait
from rlhf_spmd.runtime.execute.iteration import Iteration
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.weights.weight_mover import Mover
from rlhf_spmd.runtime.weights.weight_sync import mover_of

MAX_TENSORS = 100_000  # of one message: keeps the tags of different transfers apart
MAX_TRANSFERS = 20_000  # under way at once; a tag is a 32-bit number


class HostBuffers:
    """Host memory for messages, page-locked if the rank has a GPU, so that copies need no other buffer. Page-locking
    may wait for all that the device is doing. So all the buffers that an iteration needs at the same time are made
    before the first one, and used again."""

    def __init__(self, program: Program, rank: int, device: torch.device):
        self._is_pinned, self.num_made = device.type == "cuda", 0
        self._kept = most_under_way(program, rank)
        self._free: dict[int, list[tuple[torch.Tensor, torch.cuda.Event | None]]] = {
            num_words: [(self._made(num_words), None) for _ in range(num)] for num_words, num in self._kept.items()
        }

    def _made(self, num_words: int) -> torch.Tensor:
        self.num_made += 1
        return torch.empty(num_words, dtype=torch.int32, pin_memory=self._is_pinned)

    def take(self, num_words: int) -> torch.Tensor:
        """Takes a buffer that nothing reads any more; a new one if the device still has to copy all others: it may have
        to wait for other ranks first, so this rank must not wait for it."""
        free = self._free[num_words]
        for place, (buffer, copied) in enumerate(free):
            if copied is None or copied.query():
                del free[place]
                return buffer
        return self._made(num_words)

    def give_back(self, buffer: torch.Tensor, copied: torch.cuda.Event | None = None) -> None:
        """Gives a buffer back. Torch keeps what is left over until then.

        copied: when the device has read the buffer; None: it has.
        """
        free = self._free[len(buffer)]
        if len(free) < self._kept[len(buffer)]:
            free.append((buffer, copied))


def most_under_way(program: Program, rank: int) -> Counter[int]:
    """Returns, by the words of a message through host memory, how many such messages a rank has under way at one time,
    at most."""
    sizes = {
        number: Counter(one.num_bytes // 4 for one in transfer.messages if rank in (one.source, one.destination))
        for number, transfer in enumerate(program.transfers)
        if transfer.communicator == HOST
    }
    under_way, most = Counter[int](), Counter[int]()
    for step in program.instructions[rank]:
        if isinstance(step, Post):
            under_way += sizes.get(step.transfer, Counter())
            most |= under_way
        elif isinstance(step, Wait):
            under_way -= sizes.get(step.transfer, Counter())
    return most


class Transfers:
    """This rank's part of the transfers of a program. What it sends is counted for the iteration that it serves."""

    def __init__(self, job: Job):
        self.program, self.world, self.models = job.program, job.world, job.models
        # transfer -> its operations, the buffers that rows arrive in, and those that they leave from
        self.pending: dict[int, tuple[list[dist.Work], list[tuple[Message, torch.Tensor]], list[torch.Tensor]]] = {}
        self.movers: dict[int, Mover] = {}  # transfer of weights -> this rank's part of it
        name = self.program.host_group
        self.host: dist.ProcessGroup | None = None if name is None else self.world.group(name)
        self.buffers = HostBuffers(self.program, self.world.rank, self.world.device)

    def post(self, number: int, data: Iteration) -> None:
        """Starts all sends and receives of this rank at once; both ends list them in the transfer's order."""
        transfer, rank = self.program.transfers[number], self.world.rank
        of_iteration = number + data.number % 2 * len(self.program.transfers)  # in a chain two may be under way
        tag = of_iteration % MAX_TRANSFERS * MAX_TENSORS  # a pair may exchange several messages
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
                    words = self.buffers.take(len(words)).copy_(words)  # waits for the stream that makes them
                leaving.append(words)
                data.num_bytes_sent += words.nbytes
                data.num_messages_sent += 1
                operations.append(dist.P2POp(dist.isend, words, message.destination, group=group, tag=tag + place))
                assert words.nbytes == message.num_bytes, (transfer.what, message)
            elif rank == message.destination:
                size = message.num_bytes // 4
                on_device = {"dtype": torch.int32, "device": self.world.device}
                words = self.buffers.take(size) if through_host else torch.empty(size, **on_device)
                arriving.append((message, words))
                operations.append(dist.P2POp(dist.irecv, words, message.source, group=group, tag=tag + place))
        self.pending[number] = (dist.batch_isend_irecv(operations), arriving, leaving)

    def _packed(self, transfer: Transfer, message: Message, data: Iteration) -> torch.Tensor:
        """Packs the rows of a message into one buffer of 4-byte words, key after key. Contiguous rows of a single key
        are sent from the store itself, because a row never changes once it is made."""
        place = self._rows(transfer, message)
        if not message.keys:
            return torch.zeros(1, dtype=torch.int32, device=self.world.device)  # a notice, made behind the rows
        words = [data.store.at(key, place).contiguous().flatten().view(torch.int32) for key in message.keys]
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
            data.num_bytes_sent += mover.num_bytes_sent
            data.num_messages_sent += mover.num_messages_sent
            return
        works, arriving, leaving = self.pending.pop(number)
        for work in works:
            work.wait()
        for message, words in arriving:
            self._unpack(transfer, message, words.to(self.world.device, non_blocking=True), data)
        if transfer.communicator == HOST:
            copied = torch.cuda.current_stream().record_event() if self.world.device.type == "cuda" else None
            for words in leaving:
                self.buffers.give_back(words)
            for _, words in arriving:
                self.buffers.give_back(words, copied)

    def _unpack(self, transfer: Transfer, message: Message, words: torch.Tensor, data: Iteration) -> None:
        start = 0
        for key in message.keys:
            place = data.store.at(key, self._rows(transfer, message))
            num_words = place.nbytes // words.itemsize
            piece = words[start : start + num_words].view(place.dtype)
            place.copy_(piece.view(place.shape))
            start += num_words
