"""Executes a run that draws one iteration ahead (plan/program/ahead.py): a batch trains while the next one is drawn."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.plan.program.ahead import EPILOGUE, PROLOGUE, STEP, draws, part_of, transfer_draws
from rlhf_spmd.plan.program.instructions import Program, Run
from rlhf_spmd.runtime.ahead.in_flight import Batch, collect, restore
from rlhf_spmd.runtime.checkpoint.checkpoint_files import Checkpoint
from rlhf_spmd.runtime.checkpoint.saving import Tensors
from rlhf_spmd.runtime.diagnosis.wait_graph import text_of
from rlhf_spmd.runtime.execute.executor import Executor
from rlhf_spmd.runtime.execute.iteration import Iteration
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.guard.signals import Asked
from rlhf_spmd.runtime.observe.trace import Tracer
from rlhf_spmd.runtime.run.loop import Loop
from rlhf_spmd.runtime.run.prepare import make_iteration


@dataclass(slots=True)
class Step:
    """The batch that trains and the one that is drawn meanwhile; one of them may be absent."""

    trained: Batch | None
    drawn: Batch | None

    @property
    def number(self) -> int:
        """That of the iteration that trains; in the prologue, of the one that is drawn."""
        batch = self.trained or self.drawn
        assert batch is not None
        return batch.data.number

    @property
    def title(self) -> str:
        """What messages call it: both iterations."""
        trained, drawn = self.trained, self.drawn
        if trained is None:
            assert drawn is not None
            return f"drawing for {drawn.data.title}"
        return trained.data.title + ("" if drawn is None else f" and drawing for {drawn.data.number + 1}")


class AheadExecutor(Executor):
    """Carries out steps, each on the data of two batches."""

    def __init__(self, job: Job, recorder: Tracer, asked: Asked | None = None):
        self.parts: dict[str, Program] = {part: part_of(job.program, part) for part in (STEP, PROLOGUE, EPILOGUE)}
        super().__init__(job, recorder, asked)

    def step(self, step: Step) -> list[dict[str, Any]]:
        """Executes the list that a step needs -> the messages of all ranks about the batch that trains."""
        part = PROLOGUE if step.trained is None else EPILOGUE if step.drawn is None else STEP
        self.program = self.transfers.program = self.parts[part]
        self.instructions = self.program.instructions[self.world.rank]
        self.texts = [text_of(self.program, instruction) for instruction in self.instructions]
        self.begin()
        return self.iteration(step)

    def run(self, run: Run, data: Step) -> Callable[[], None] | None:
        batch = data.drawn if draws(self.program, run) else data.trained
        assert batch is not None
        return super().run(run, batch.data)

    def post(self, number: int, data: Step) -> None:
        self._of_transfer(number, data, super().post)

    def wait(self, number: int, data: Step) -> None:
        self._of_transfer(number, data, super().wait)

    def _of_transfer(self, number: int, data: Step, act: Callable[[int, Iteration], None]) -> None:
        """Counts what a transfer sends for the batch that it serves: its rows, or the weights that it has changed."""
        batch = data.drawn if transfer_draws(self.program, number) else data.trained
        assert batch is not None
        before = self.transfers.num_bytes_sent, self.transfers.num_messages_sent
        act(number, batch.data)
        now = self.transfers.num_bytes_sent, self.transfers.num_messages_sent
        batch.sent = (batch.sent[0] + now[0] - before[0], batch.sent[1] + now[1] - before[1])

    def agree(self, data: Step, what: str) -> list[dict[str, Any]]:
        """Exchanges messages about the batch that trains; in the prologue, signals alone."""
        if data.trained is None:
            signals = json.dumps({"signals": self.asked.take()}).encode()
            return [json.loads(said) for said in self.world.allgather_bytes(signals, what)]
        self.transfers.num_bytes_sent, self.transfers.num_messages_sent = data.trained.sent
        return super().agree(data.trained.data, what)


class AheadLoop(Loop):
    """The steps of a run."""

    executor: AheadExecutor
    in_flight: Batch | None = None  # that of the next iteration; None: it is drawn first

    def take_up(self, checkpoint: Checkpoint) -> str:
        """Restores the batch in flight of a checkpoint -> a note if it has none. Collective."""
        self.in_flight = restore(self.job, checkpoint, len(self.history))
        if self.in_flight is not None or len(self.history) == self.job.config.iterations:
            return ""
        return "note: this run had ended: its next iteration is drawn with the newest weights, not with older ones"

    def share_in_flight(self) -> Tensors | None:
        return None if self.in_flight is None else collect(self.job, self.in_flight)

    def iterate(self, number: int) -> tuple[Iteration, list[dict[str, Any]]]:
        """Trains one batch, and draws the next one, if there is one."""
        total = self.job.config.iterations
        signals: list[dict[str, Any]] = []
        if self.in_flight is None:
            self.in_flight = Batch(make_iteration(self.job, number))
            self.now = self.in_flight.data
            signals = self.executor.step(Step(None, self.in_flight))
            self.executor.recorder.forget(number + 1)  # what follows is the first whole iteration
        trained, drawn = self.in_flight, Batch(make_iteration(self.job, number + 1)) if number + 1 < total else None
        self.now, self.in_flight = trained.data, drawn
        answers = self.executor.step(Step(trained, drawn))
        for answer, early in zip(answers, signals, strict=False):
            answer["signals"] = sorted({*answer["signals"], *early["signals"]})
        return trained.data, answers
