"""A Run that goes through the stages of a pipeline: what a pass of one micro-batch computes, and the messages between.

plan/program/pipeline.py says in which order passes and messages come; `Passage` carries that out for any kind of call.
"""

# n tokens of a tp rank's share, D hidden

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.model.sequences import Sequences, forward
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.program.instructions import Instruction, Post, Run, Wait
from rlhf_spmd.plan.program.pipeline import Body, Pass
from rlhf_spmd.runtime.execute.optimizer_step import Step, Training


class Passes(Protocol):
    """The passes of one Run on one rank."""

    model: Transformer
    num_micro_batches: int

    def num_tokens(self, index: int) -> int:
        """Real tokens of a micro-batch."""

    def forward(self, index: int, received_nD: Tensor | None) -> Tensor | None:
        """One micro-batch through this stage -> what goes to the next one, if there is one."""

    def backward(self, index: int, received_nD: Tensor | None) -> Tensor | None:
        """The gradient of this stage's output -> that of its input."""

    def close(self) -> None:
        """After the last pass."""


class Inference:
    """Forwards without gradients; `finish` makes the results of a micro-batch from the last stage's output."""

    def __init__(
        self,
        model: Transformer,
        batches: Sequence[Sequences],
        finish: Callable[[int, Tensor], None],
        close: Callable[[], None],
    ):
        self.model, self.batches, self.finish, self.close = model, batches, finish, close
        self.num_micro_batches = len(batches)

    def num_tokens(self, index: int) -> int:
        return len(self.batches[index].tokens_N)

    @torch.no_grad()
    def forward(self, index: int, received_nD: Tensor | None) -> Tensor | None:
        output_nD = forward(self.model, self.batches[index], received_nD)
        if not self.model.parallel.is_last:
            return output_nD
        self.finish(index, output_nD)
        return None


class Optimization:
    """1F1B of one optimizer step."""

    def __init__(self, training: Training, step: Step, close: Callable[[], None]):
        self.training, self.step, self.close = training, step, close
        self.model, self.num_micro_batches = step.engine.model, len(step.micro_batches)
        step.engine.begin()

    def num_tokens(self, index: int) -> int:
        rows = self.step.micro_batches[index]
        call = self.step.call
        num_prompts = int((rows[call.prompts] >= 0).sum())
        return len(call.responses) * num_prompts + sum(int((rows[key] >= 0).sum()) for key in call.responses)

    def forward(self, index: int, received_nD: Tensor | None) -> Tensor | None:
        return self.training.forward(self.step, index, received_nD)

    def backward(self, index: int, received_nD: Tensor | None) -> Tensor | None:
        return self.training.backward(self.step, index, received_nD)


class Passage:
    """Executes the body of one Run on this rank."""

    def __init__(self, body: Body, passes: Passes, rank: int):
        self.body, self.passes, self.rank = body, passes, rank
        self.leaving: dict[Pass, Tensor] = {}
        self.arrived: dict[Pass, Tensor] = {}
        self.pending: dict[int, tuple[list[dist.Work], Tensor]] = {}

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        return self.body.instructions[self.rank]

    def execute(self, step: Instruction) -> None:
        if isinstance(step, Post):
            self._post(step.transfer)
        elif isinstance(step, Wait):
            self._wait(step.transfer)
        else:
            self._run(step)

    def _run(self, step: Run) -> None:
        if step.phase == "update":
            self.passes.close()
            return
        key = step.phase, step.micro_batch
        compute = self.passes.forward if step.phase == "forward" else self.passes.backward
        result_nD = compute(step.micro_batch, self.arrived.pop(key, None))
        if result_nD is not None:
            self.leaving[key] = result_nD

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
        self.pending[number] = dist.batch_isend_irecv([operation]), buffer_nD

    def _wait(self, number: int) -> None:
        works, buffer_nD = self.pending.pop(number)
        for work in works:
            work.wait()
        message = next(m for m in self.body.transfers[number].messages if self.rank in (m.source, m.destination))
        if message.destination == self.rank:
            self.arrived[self.body.passes[number][0]] = buffer_nD
