"""Executes a rank's instruction list; plan/program.py says what each instruction means.

A failure inside an instruction becomes one message that names rank, host, iteration, instruction, group, and, when a
deadline passed, the ranks that have not arrived.
"""

import torch
import torch.distributed as dist

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.program import Agree, Instruction, Message, Post, Program, Run, Transfer, Wait
from rlhf_spmd.runtime.calls import Calls, Iteration, State
from rlhf_spmd.runtime.models import Models
from rlhf_spmd.runtime.trace import Recorder
from rlhf_spmd.runtime.world import World

# What torch.distributed's backends raise when a peer is late or gone (they have no exception type of their own).
PEER_ERRORS = ("gloo", "timed out", "timeout", "connection", "nccl", "peer", "socket")
MAX_TENSORS = 100_000  # of one message: keeps the tags of different transfers apart


class Executor:
    """Runs iterations of one program on this rank."""

    def __init__(self, program: Program, world: World, models: Models, calls: Calls, recorder: Recorder):
        self.program, self.world, self.models, self.calls, self.recorder = program, world, models, calls, recorder
        self.instructions = program.instructions[world.rank]
        self.pending: dict[int, tuple[list[dist.Work], list[tuple[Message, list[torch.Tensor]]]]] = {}
        self.num_bytes_sent = 0

    def iteration(self, data: Iteration, state: State) -> list[dict]:
        """One pass over the list; returns what every rank said at the closing Agree."""
        self.recorder.iteration = data.number
        answers: list[dict] = []
        for position, step in enumerate(self.instructions):
            self.world.progress(_meeting(step, data))
            try:
                answers = self._execute(step, data, state) or answers
            except UserError:
                raise
            except (RuntimeError, dist.DistError) as error:
                raise self._explained(error, step, position, data) from error
        return answers

    def _execute(self, step: Instruction, data: Iteration, state: State) -> list[dict] | None:
        if isinstance(step, Run):
            with self.recorder.span(step.call, "compute", epoch=step.epoch, mini_batch=step.mini_batch):
                self.calls.run(step, data, state)
        elif isinstance(step, Post):
            with self.recorder.span(f"post {self.program.transfers[step.transfer].what}", "transfer"):
                self._post(step.transfer, data)
        elif isinstance(step, Wait):
            with self.recorder.span(f"wait {self.program.transfers[step.transfer].what}", "wait"):
                self._wait(step.transfer, data)
        else:
            assert isinstance(step, Agree)
            with self.recorder.span(step.what, "control"):
                return self.world.allgather(self._message(data), f"iteration {data.number}: {step.what}")
        return None

    def _message(self, data: Iteration) -> dict:
        """This rank's numbers, and the responses that it generated itself, by prompt and sample."""
        generate = next(call for call in self.program.workload.workflow.calls if call.kind == "generate")
        layout = self.program.placement.layouts[generate.name]
        responses: list[list] = []
        if self.world.rank in layout.ranks:
            columns = layout.columns(self.world.rank, self.program.workload.mini_batch)
            part = slice(columns.start, columns.stop)
            prompts, samples = data.prompt_MC[:, part].flatten(), data.sample_MC[:, part].flatten()
            tokens = data.store["responses"][:, part].flatten(0, 1).tolist()
            for row, prompt, sample in zip(tokens, prompts.tolist(), samples.tolist(), strict=True):
                responses.append([prompt, sample, [token for token in row if token >= 0]])
        return data.meter.to_message() | {"responses": responses}

    # ---- transfers --------------------------------------------------------------------------------------------------

    def _post(self, number: int, data: Iteration) -> None:
        """Starts all sends and receives of this rank at once; both ends list them in the transfer's order."""
        transfer, rank = self.program.transfers[number], self.world.rank
        operations, entries = [], []
        for place, message in enumerate(transfer.messages):
            if rank not in (message.source, message.destination):
                continue
            sending = rank == message.source
            tensors = self._packed(transfer, message, data, sending)
            num_bytes = sum(tensor.nbytes for tensor in tensors)
            assert num_bytes == message.num_bytes, (transfer.what, num_bytes, message.num_bytes)
            self.num_bytes_sent += num_bytes if sending else 0
            peer = message.destination if sending else message.source
            for index, tensor in enumerate(tensors):
                operation = dist.isend if sending else dist.irecv
                tag = number * MAX_TENSORS + place + index  # a pair may exchange several messages, or several tensors
                operations.append(dist.P2POp(operation, tensor, peer, tag=tag))
            entries.append((message, tensors))
        self.pending[number] = (dist.batch_isend_irecv(operations), entries)

    def _packed(self, transfer: Transfer, message: Message, data: Iteration, sending: bool) -> list[torch.Tensor]:
        """Tensors on the wire: the weights themselves, or one buffer of 4-byte words with all keys."""
        if transfer.model is not None:
            return self.models.tensors(transfer.model)
        part = slice(message.columns.start, message.columns.stop)
        if not sending:
            return [torch.empty(message.num_bytes // 4, dtype=torch.int32, device=self.world.device)]
        words = []
        for key in transfer.keys:
            value = data.store[key][:, part].contiguous()
            words.append((value.int() if value.dtype == torch.int64 else value.view(torch.int32)).flatten())
        return [torch.cat(words)]

    def _wait(self, number: int, data: Iteration) -> None:
        transfer = self.program.transfers[number]
        works, entries = self.pending.pop(number)
        for work in works:
            work.wait()
        for message, tensors in entries:
            if message.destination == self.world.rank and transfer.model is None:
                self._unpack(transfer, message, tensors[0], data)

    def _unpack(self, transfer: Transfer, message: Message, words: torch.Tensor, data: Iteration) -> None:
        part = slice(message.columns.start, message.columns.stop)
        start = 0
        for key in transfer.keys:
            place = self.calls.place_for(data, key)[:, part]
            piece = words[start : start + place.numel()].view(place.shape)
            place.copy_(piece.view(torch.float32) if place.is_floating_point() else piece)
            start += place.numel()

    # ---- failures ---------------------------------------------------------------------------------------------------

    def _explained(self, error: Exception, step: Instruction, position: int, data: Iteration) -> Exception:
        """A lost or late peer as a UserError with names; any other error as it is."""
        text = str(error).lower()
        if not any(word in text for word in PEER_ERRORS):
            return error
        world = self.world
        met = step
        if isinstance(step, Run):
            ranks = self.program.groups.get(step.group, (world.rank,))
        elif isinstance(step, Agree):
            ranks = self.program.cluster.ranks
        else:
            ranks = tuple(self.program.transfers[step.transfer].peers(world.rank))
            met = Post(step.transfer)  # a peer that has posted its part may wait for it much later
        place = f"iteration {data.number}, instruction {position}: {step}"
        late = world.stragglers([rank for rank in ranks if rank != world.rank], _meeting(met, data))
        names = "; ".join(f"rank {rank} on {world.hosts[rank]} last said: {where}" for rank, where in late.items())
        return UserError(
            f"rank {world.rank} on {world.hosts[world.rank]} gave up waiting in {place}: "
            + (names or "all its peers arrived, but a message did not get through")
            + f"; the deadline is deadline_s ({str(error).splitlines()[0][:120]})"
        )


def _meeting(step: Instruction, data: Iteration) -> str:
    """What the ranks that meet at an instruction all say there; its position in their lists differs."""
    return f"iteration {data.number}: {step}"
