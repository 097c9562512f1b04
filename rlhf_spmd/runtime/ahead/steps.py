"""Executes a run that draws one iteration ahead (plan/program/ahead.py): a batch trains while the next one is drawn."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.plan.program.ahead import EPILOGUE, PROLOGUE, STEP, draws, is_in, transfer_draws
from rlhf_spmd.plan.program.instructions import Instruction, Load, Offload, Run
from rlhf_spmd.runtime.ahead.in_flight import Batch
from rlhf_spmd.runtime.execute.executor import Executor
from rlhf_spmd.runtime.execute.instruction_loop import InstructionLoop
from rlhf_spmd.runtime.execute.iteration import Iteration
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.failure.signals import Asked
from rlhf_spmd.runtime.world.trace import Tracer


@dataclass(slots=True)
class Batches:
    """The batch that trains and the one that is drawn meanwhile; one of them may be absent."""

    trained: Batch | None
    drawn: Batch | None

    @property
    def number(self) -> int:
        """The number of the iteration that trains; in the prologue, of the one that is drawn."""
        batch = self.trained or self.drawn
        assert batch is not None
        return batch.data.number

    @property
    def title(self) -> str:
        """What messages, flight records and timelines call it: both iterations. Short: a flight record keeps 40
        bytes."""
        trained, drawn = self.trained, self.drawn
        if trained is None:
            assert drawn is not None
            return f"drawing {drawn.data.title}"
        return trained.data.title + ("" if drawn is None else f", drawing {drawn.data.number + 1}")

    def of(self, draws: bool) -> Batch:
        """Returns the batch that is drawn, or the one that trains."""
        batch = self.drawn if draws else self.trained
        assert batch is not None
        return batch


class AheadExecutor(InstructionLoop):
    """Carries out steps with torch, each on the data of two batches."""

    def __init__(self, job: Job, recorder: Tracer, asked: Asked | None = None):
        """asked: as of Executor."""
        super().__init__(job.program, job.world, recorder)
        # what a part executes of the list of a step, whose wait graph then holds for every part
        every = [*super().steps()]
        self.parts = {
            part: [one for one in every if is_in(job.program, one[1], part)] for part in (STEP, PROLOGUE, EPILOGUE)
        }
        self.part = STEP
        self.inner = Executor(job, recorder, asked)  # of the instructions one by one

    def iteration(self, batches: Batches) -> list[dict[str, Any]]:
        """Executes the list that a step needs -> the messages of all ranks about the batch that trains."""
        part = PROLOGUE if batches.trained is None else EPILOGUE if batches.drawn is None else STEP
        if part != self.part:
            self.begin()  # the prologue and the first step have the same number
        self.part = part
        return super().iteration(batches)

    def steps(self) -> list[tuple[int, Instruction]]:
        """Returns what the part of the run executes."""
        return self.parts[self.part]

    def of_batch(self, instruction: Instruction, data: Batches) -> dict[str, Any]:
        """Returns the iteration for which something is drawn, from 0."""
        drawn = draws(self.program, instruction) and data.drawn is not None
        return {"iteration": data.of(True).data.number} if drawn else {}

    def reset(self) -> None:
        """Frees what the device's allocator holds back."""
        self.inner.reset()

    def run(self, run: Run, batches: Batches) -> Callable[[], None] | None:
        """Executes a Run of any call, on the batch that it belongs to."""
        return self.inner.run(run, batches.of(draws(self.program, run)).data)

    def post(self, number: int, batches: Batches) -> None:
        """Starts this rank's part of a transfer."""
        self._of_transfer(number, batches, self.inner.post)

    def wait(self, number: int, batches: Batches) -> None:
        """Waits until this rank's part of a transfer is done."""
        self._of_transfer(number, batches, self.inner.wait)

    def load(self, load: Load) -> None:
        """Brings the weights of a frozen model to the device."""
        self.inner.load(load)

    def offload(self, offload: Offload) -> None:
        """Frees the weights of a frozen model on the device."""
        self.inner.offload(offload)

    def agree(self, batches: Batches, what: str) -> list[dict[str, Any]]:
        """Exchanges messages about the batch that trains; in the prologue all ranks meet, and the first step tells of
        signals."""
        if batches.trained is None:
            self.world.allgather_bytes(b"", what)
            return []
        transfers = self.inner.transfers
        transfers.num_bytes_sent, transfers.num_messages_sent = batches.trained.sent
        return self.inner.agree(batches.trained.data, what)

    def _of_transfer(self, number: int, batches: Batches, act: Callable[[int, Iteration], None]) -> None:
        """Counts what a transfer sends for the batch that it serves: its rows, or the weights that it has changed."""
        batch = batches.of(transfer_draws(self.program, number))
        transfers = self.inner.transfers
        before = transfers.num_bytes_sent, transfers.num_messages_sent
        act(number, batch.data)
        num_bytes, num_messages = transfers.num_bytes_sent - before[0], transfers.num_messages_sent - before[1]
        batch.sent = batch.sent[0] + num_bytes, batch.sent[1] + num_messages
