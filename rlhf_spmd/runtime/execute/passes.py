"""The passes of a Run of a model: a forward of each micro-batch on this rank's stage, and where it trains a backward.

plan/program/pipeline.py defines the order of passes and messages between stages; `through_stages` carries that out
for any kind of call.
"""

# n tokens of a tp rank's share, D hidden

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.model.sequences import Sequences, forward
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.calls import ModelCall, Train
from rlhf_spmd.plan.program.instructions import Message, Post, Run, Wait
from rlhf_spmd.plan.program.pipeline import Pass, body
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.world.trace import Tracer


class Passes:
    """The passes of one Run on one rank: forwards without gradients, whose outputs are read on the last stage, unless a
    kind of call has others. batches: the tokens of its micro-batches."""

    def __init__(self, job: Job, call: ModelCall, run: Run, model: Transformer, batches: list[Sequences]):
        self.job, self.call, self.run, self.model, self.batches = job, call, run, model, batches

    def within(self) -> AbstractContextManager[object]:
        """Returns a context in which the weights are there."""
        return self.job.models.weights(self.call)

    def forward(self, index: int, received_nD: Tensor | None = None) -> Tensor | None:
        """Runs one micro-batch through this stage.

        received_nD: the output of the previous stage.

        Returns this stage's, for the next one; None on the last stage.
        """
        output_nD = forward(self.model, self.batches[index], received_nD)
        if not self.model.parallel.is_last:
            return output_nD
        self.read(index, output_nD)
        return None

    def read(self, index: int, output_nD: Tensor) -> None:
        """Takes the output of one micro-batch on the last stage."""
        raise NotImplementedError

    def backward(self, index: int, received_nD: Tensor | None = None) -> Tensor | None:
        """Runs the backward pass of one micro-batch.

        received_nD: the gradient of this stage's output.

        Returns that of its input; None on the first stage.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Ends the Run after its last pass."""


def through_stages(passes: Passes, recorder: Tracer) -> None:
    """Runs all passes of a Run with stages, and sends the messages between them. The ranks have agreed on the number of
    micro-batches."""
    run, model, rank, layout = passes.run, passes.model, passes.job.world.rank, passes.job.layout(passes.call)
    bare = replace(run, group=None, mini_batch=None, epoch=0)  # bodies differ in nothing else
    plan = body(layout, passes.call, bare, layout.dp_index(rank), len(passes.batches))
    tensors: dict[Pass, Tensor] = {}  # what a pass reads, and what it has made to be sent on
    pending: dict[int, tuple[list[dist.Work], Message, Tensor]] = {}
    about = {"epoch": run.epoch, "mini_batch": run.mini_batch}
    with passes.within():
        for step in plan.instructions[rank]:
            if isinstance(step, Run):
                with recorder.span(run.call, "compute", **about, micro_batch=step.micro_batch):
                    if step.micro_batch is None:  # the phase "update"
                        passes.close()
                    else:
                        key = step.phase, step.micro_batch
                        one = passes.forward if step.phase == "forward" else passes.backward
                        if (made_nD := one(step.micro_batch, tensors.pop(key, None))) is not None:
                            tensors[key] = made_nD
                continue
            assert isinstance(step, Post | Wait)
            key = plan.passes[step.transfer][0]
            with recorder.span(str(step), "wait" if isinstance(step, Wait) else "transfer"):
                if isinstance(step, Wait):
                    works, message, buffer_nD = pending.pop(step.transfer)
                    for work in works:
                        work.wait()
                    if message.destination == rank:
                        tensors[key] = buffer_nD
                    continue
                messages = plan.transfers[step.transfer].messages
                message = next(one for one in messages if rank in (one.source, one.destination))
                if message.source == rank:
                    direction, peer, buffer_nD = dist.isend, message.destination, tensors.pop(key).contiguous()
                else:
                    shape = model.output_shape(len(passes.batches[key[1]].tokens_N))
                    buffer_nD = torch.empty(shape, dtype=model.dtype, device=passes.job.world.device)
                    direction, peer = dist.irecv, message.source
                operation = dist.P2POp(direction, buffer_nD, peer, group=model.parallel.stages, tag=step.transfer)
                pending[step.transfer] = dist.batch_isend_irecv([operation]), message, buffer_nD
    if not isinstance(passes.call, Train):
        passes.close()


@contextmanager
def deterministic() -> Iterator[None]:
    """Makes torch compute the same bits each time: on a GPU the backward pass of attention, and of what reads by index,
    adds in any order otherwise."""
    torch.utils.deterministic.fill_uninitialized_memory = False  # which only finds faults
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
