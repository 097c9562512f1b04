"""Executes a rank's instruction list; plan/program/instructions.py says what each instruction means. A subclass carries
them out: with torch (executor.py), or as a rehearsal (rehearse/). No torch, no MPI.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.program.instructions import Agree, Instruction, Load, Offload, Post, Program, Run, Wait
from rlhf_spmd.runtime.failure.diagnosis import peer_error, text_of
from rlhf_spmd.runtime.world.trace import Tracer


class InstructionLoop(ABC):
    """Runs iterations of one program on this rank. `data` of an iteration has a number and a title."""

    def __init__(self, program: Program, world: Any, recorder: Tracer):
        self.program, self.world, self.recorder = program, world, recorder
        self.instructions = program.instructions[world.rank]
        self.texts = [text_of(program, instruction) for instruction in self.instructions]

    def begin(self) -> None:
        """Tells the world that this program is executed from now on; needed again after another one."""
        self.world.will_execute(self.program)

    def iteration(self, data: Any) -> list[dict[str, Any]]:
        """Executes the list once and returns the messages of all ranks at the closing Agree."""
        self.recorder.iteration = data.number
        self.reset()  # while no message is under way
        answers: list[dict[str, Any]] = []
        for position, step in self.steps():
            of_batch = self.of_batch(step, data)
            self.world.progress(f"{data.title}: {self.texts[position]}", data.number, position)
            try:
                if isinstance(step, Run):
                    args = {"epoch": step.epoch, "mini_batch": step.mini_batch} | of_batch
                    with self.recorder.span(step.call, "compute", **args):
                        rest = self.run(step, data)
                    if rest is not None:
                        rest()
                elif isinstance(step, Post):
                    what = self.program.transfers[step.transfer].what
                    with self.recorder.span(f"post {what}", "transfer", transfer=step.transfer, **of_batch):
                        self.post(step.transfer, data)
                elif isinstance(step, Wait):
                    what = self.program.transfers[step.transfer].what
                    with self.recorder.span(f"wait {what}", "wait", transfer=step.transfer, **of_batch):
                        self.wait(step.transfer, data)
                elif isinstance(step, Load):
                    with self.recorder.span(f"load {step.model}", "transfer"):
                        self.load(step)
                elif isinstance(step, Offload):
                    self.offload(step)
                elif isinstance(step, Agree):
                    with self.recorder.span(step.what, "control"):
                        answers = self.agree(data, f"{data.title}: {step.what}")
                if position == len(self.instructions) - 1:
                    self.recorder.read_marks()  # waits for the device: an iteration ends when its last kernel does
            except UserError:
                raise
            except RuntimeError as error:  # those of torch.distributed are
                raise peer_error(error, self.program, self.world, data, step, position) from error
        self.world.progress(f"{data.title}: over", data.number)
        return answers

    def steps(self) -> Iterable[tuple[int, Instruction]]:
        """Returns the instructions to execute, with their places in the list."""
        return enumerate(self.instructions)

    def of_batch(self, instruction: Instruction, data: Any) -> dict[str, Any]:
        """Returns what a span says of the iteration for which an instruction works, if that is another one."""
        return {}

    @abstractmethod
    def reset(self) -> None:
        """Resets what an iteration begins with, before its first instruction."""

    @abstractmethod
    def run(self, run: Run, data: Any) -> Callable[[], None] | None:
        """Computes a Run. Returns what is left of it and records spans of its own, if anything does."""

    @abstractmethod
    def post(self, number: int, data: Any) -> None:
        """Starts this rank's part of a transfer."""

    @abstractmethod
    def wait(self, number: int, data: Any) -> None:
        """Waits until this rank's part of a transfer is done."""

    @abstractmethod
    def load(self, load: Load) -> None:
        """Brings the weights of a frozen model to the device."""

    @abstractmethod
    def offload(self, offload: Offload) -> None:
        """Frees the weights of a frozen model on the device."""

    @abstractmethod
    def agree(self, data: Any, what: str) -> list[dict[str, Any]]:
        """Exchanges messages of all ranks at the end of an iteration."""
