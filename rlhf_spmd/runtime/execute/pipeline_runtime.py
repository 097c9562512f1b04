"""A Run that goes through the stages of a pipeline: what a pass of one micro-batch computes, and the messages between.

plan/program/pipeline.py says in which order passes and messages come; `Passage` carries that out for any kind of call.
"""

# n tokens of a tp rank's share, D hidden

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.program.instructions import Instruction, Message, Post, Run, Wait
from rlhf_spmd.plan.program.pipeline import Body, Pass, order_of_passes

OnePass = Callable[[int, Tensor | None], Tensor | None]  # micro-batch, received_nD -> what is sent on, if anything is


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes of one Run on one rank. num_tokens: real tokens of a micro-batch. forward: from the output of the
    previous stage to that of this one. close: called after the last pass. backward: from the gradient of this stage's
    output to that of its input; None: the Run does not train. within: a context in which the weights are there."""

    model: Transformer
    num_micro_batches: int
    num_tokens: Callable[[int], int]
    forward: OnePass
    close: Callable[[], None]
    backward: OnePass | None = None
    within: AbstractContextManager[object] = field(default_factory=nullcontext)

    def execute(self, kind: str, index: int, received_nD: Tensor | None = None) -> Tensor | None:
        """One pass. kind: "forward" or "backward"."""
        if kind == "forward":
            return self.forward(index, received_nD)
        assert self.backward is not None, "only a Run that trains has backward passes"
        return self.backward(index, received_nD)

    def run(self) -> None:
        """All passes of a pipeline of one stage."""
        with self.within:
            for kind, index in order_of_passes(0, 1, self.num_micro_batches, train=self.backward is not None):
                self.execute(kind, index)
        self.close()


class Passage:
    """Executes the body of one Run on this rank."""

    def __init__(self, body: Body, passes: Passes, rank: int):
        self.body, self.passes, self.rank = body, passes, rank
        self.leaving: dict[Pass, Tensor] = {}
        self.arrived: dict[Pass, Tensor] = {}
        self.pending: dict[int, tuple[list[dist.Work], Message, Tensor]] = {}

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        return self.body.instructions[self.rank]

    def execute(self, step: Instruction) -> None:
        if isinstance(step, Post):
            self._post(step.transfer)
        elif isinstance(step, Wait):
            self._wait(step.transfer)
        elif isinstance(step, Run) and step.micro_batch is not None:
            key = step.phase, step.micro_batch
            result_nD = self.passes.execute(*key, self.arrived.pop(key, None))
            if result_nD is not None:
                self.leaving[key] = result_nD
        else:
            self.passes.close()  # the phase "update"

    def _post(self, number: int) -> None:
        message = next(m for m in self.body.transfers[number].messages if self.rank in (m.source, m.destination))
        made, model = self.body.passes[number][0], self.passes.model
        if message.source == self.rank:
            buffer_nD = self.leaving.pop(made).contiguous()
            direction, peer = dist.isend, message.destination
        else:
            shape = model.output_shape(self.passes.num_tokens(made[1]))
            buffer_nD = torch.empty(shape, dtype=model.dtype, device=next(model.parameters()).device)
            direction, peer = dist.irecv, message.source
        operation = dist.P2POp(direction, buffer_nD, peer, group=model.parallel.stages, tag=number)
        self.pending[number] = dist.batch_isend_irecv([operation]), message, buffer_nD

    def _wait(self, number: int) -> None:
        works, message, buffer_nD = self.pending.pop(number)
        for work in works:
            work.wait()
        if message.destination == self.rank:
            self.arrived[self.body.passes[number][0]] = buffer_nD
