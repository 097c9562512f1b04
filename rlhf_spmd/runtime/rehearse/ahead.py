"""The rehearsal of a run that draws one iteration ahead: a first batch, steps that train one and draw the next, a last
batch (plan/program/ahead.py). No torch."""

from dataclasses import dataclass
from typing import Any

from rlhf_spmd.plan.program.ahead import EPILOGUE, PROLOGUE, STEP, draws, part_of, transfer_draws
from rlhf_spmd.plan.program.instructions import Load, Offload, Program, Run
from rlhf_spmd.plan.workflow import trains
from rlhf_spmd.runtime.execute.instruction_loop import InstructionLoop
from rlhf_spmd.runtime.failure.diagnosis import text_of
from rlhf_spmd.runtime.rehearse.rehearsal import Rehearsal, Rehearsed, expanded


@dataclass(frozen=True, slots=True)
class Batches:
    """The batch that trains and the one that is drawn meanwhile; one of them may be absent."""

    trained: Rehearsed | None
    drawn: Rehearsed | None

    @property
    def part(self) -> str:
        """The list of instructions that they need (Program.part)."""
        return PROLOGUE if self.trained is None else EPILOGUE if self.drawn is None else STEP

    @property
    def number(self) -> int:
        """The number of the iteration that trains; in the prologue, of the one that is drawn."""
        batch = self.trained or self.drawn
        assert batch is not None
        return batch.number

    @property
    def title(self) -> str:
        """What messages call it."""
        trained = [] if self.trained is None else [self.trained.title]
        return " and ".join(trained + ([] if self.drawn is None else [f"drawing for {self.drawn.title}"]))


class AheadRehearsal(InstructionLoop):
    """Carries out the steps by an ordinary rehearsal, each instruction on the batch that it belongs to."""

    def __init__(self, program: Program, world: Any, *options: Any):
        """program: of a step, not expanded. options: the others of Rehearsal."""
        self.parts = {part: expanded(part_of(program, part)) for part in (STEP, PROLOGUE, EPILOGUE)}
        self.inner = Rehearsal(self.parts[STEP], world, *options)
        super().__init__(self.parts[STEP], world, self.inner.recorder)

    def iteration(self, batches: Batches) -> list[dict[str, Any]]:
        """Carries out the list that a step needs."""
        self.program = self.inner.program = self.parts[batches.part]
        self.instructions = self.program.instructions[self.world.rank]
        self.texts = [text_of(self.program, instruction) for instruction in self.instructions]
        self.inner.begin()
        return super().iteration(batches)

    def reset(self) -> None:
        """Forgets what was sent in the last step."""
        self.inner.reset()

    def run(self, run: Run, batches: Batches) -> None:
        """Rehearses a Run."""
        self.inner.run(run, self._batch(batches, draws(self.program, run)))

    def post(self, number: int, batches: Batches) -> None:
        """Starts this rank's part of a transfer."""
        self.inner.post(number, self._batch(batches, self._transfer_draws(number)))

    def wait(self, number: int, batches: Batches) -> None:
        """Waits until this rank's part of a transfer is done."""
        self.inner.wait(number, self._batch(batches, self._transfer_draws(number)))

    def load(self, load: Load) -> None:
        """Sleeps for as long as loading a model takes."""
        self.inner.load(load)

    def offload(self, offload: Offload) -> None:
        """Takes no time."""

    def agree(self, batches: Batches, what: str) -> list[dict[str, Any]]:
        """Exchanges among all ranks what they sent in this step."""
        return self.inner.agree(self._batch(batches, batches.trained is None), what)

    def _transfer_draws(self, number: int) -> bool:
        """Returns whether a transfer is of the batch that is drawn; one between the stages of a call is of the call's
        batch."""
        transfer, workflow = self.program.transfers[number], self.program.workload.workflow
        if transfer.call is not None:
            return not trains(workflow.call(transfer.call), workflow)
        return transfer_draws(self.program, number)

    @staticmethod
    def _batch(batches: Batches, is_drawn: bool) -> Rehearsed:
        batch = batches.drawn if is_drawn else batches.trained
        assert batch is not None
        return batch
