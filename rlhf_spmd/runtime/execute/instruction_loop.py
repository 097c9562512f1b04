"""Executes a rank's instruction list; plan/program/instructions.py defines each instruction. A subclass carries
them out: with torch (executor.py), or as a rehearsal (rehearse/). No torch, no MPI.

A list may have delayed instructions, which belong to the iteration before: in a chain (plan/program/chain.py) waits for
its new weights, one iteration ahead (plan/program/ahead.py) all that trains its batch. Without one of the two only the
instructions of the other are executed: the first iteration has none before it, and after the last one, or where a chain
is drained, there is no next one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.program.instructions import Agree, Load, Offload, Post, Program, Run, Wait
from rlhf_spmd.plan.program.rounds import round_of, some_agree
from rlhf_spmd.runtime.failure.diagnosis import peer_error, text_of
from rlhf_spmd.runtime.world.reports import Reports
from rlhf_spmd.runtime.world.trace import Tracer


class Current(NamedTuple):
    """What a list is executed for: the number of the iteration that trains (in a prologue and in a chain, of the one
    that is sampled), from 0, and what messages, records (which keep 40 bytes) and timelines call it."""

    number: int
    title: str


class InstructionLoop(ABC):
    """Runs iterations of one program on this rank. The data of an iteration have a number and a title."""

    def __init__(self, program: Program, world: Any, recorder: Tracer):
        self.program, self.world, self.recorder = program, world, recorder
        self.instructions = program.instructions[world.rank]
        self.texts = [text_of(program, instruction) for instruction in self.instructions]
        self.current: Current | None = None
        self.absent = (False, not program.placement.ahead)  # whether the last list lacked one of its iterations
        self.rounds, self.is_full = [round_of(program, step) for step in self.instructions], False
        self.reports = Reports(world.messages()) if some_agree(program) else None

    def begin(self) -> None:
        """Tells the world that this program is executed from now on; needed again after another one."""
        self.world.will_execute(self.program)

    def iteration(self, now: Any, before: Any = None) -> list[dict[str, Any]]:
        """Executes the list once. Returns the messages of all ranks if they meet at the closing Agree and some
        iteration ends there.

        now: the data of the iteration; None: only delayed instructions are executed.
        before: the data of the iteration before; None: nothing that is delayed is executed.
        """
        self.current = current = _current(self.program, now, before)
        absent = now is None, before is None
        if before is None if self.program.chains else absent != self.absent:
            self.begin()  # the prologue, or where a chain was drained, and the next step have the same number
        self.absent = absent
        self.recorder.iteration = current.number
        self.reset()  # while no message is under way
        answers, self.is_full = list[dict[str, Any]](), False  # whether no group is left to be drawn in rounds
        for position, step in enumerate(self.instructions):
            data = before if step.delay else now
            is_closing = isinstance(step, Agree) and not step.round
            if (data is None and (self.program.chains or not is_closing)) or (self.is_full and self.rounds[position]):
                continue
            # whether it is of the iteration that does not give the list its number
            is_other = self.program.overlaps and bool(step.delay) == self.program.chains
            of_batch = {"iteration": data.number} if is_other and data is not None else {}
            self.world.progress(f"{current.title}: {self.texts[position]}", current.number, position)
            try:
                if isinstance(step, Run):
                    args = {"epoch": step.epoch, "mini_batch": step.mini_batch} | of_batch
                    with self.recorder.span(step.call, "compute", **args):
                        rest = self.run(step, data)
                    if rest is not None:
                        rest()
                elif isinstance(step, Post | Wait):
                    word, does = ("post", self.post) if isinstance(step, Post) else ("wait", self.wait)
                    what = self.program.transfers[step.transfer].what
                    args = {"transfer": step.transfer} | of_batch
                    with self.recorder.span(f"{word} {what}", "transfer" if word == "post" else "wait", **args):
                        does(step.transfer, data)
                elif isinstance(step, Load):
                    with self.recorder.span(f"load {step.model}", "transfer"):
                        self.load(step)
                elif isinstance(step, Offload):
                    self.offload(step)
                elif isinstance(step, Agree):
                    with self.recorder.span(step.what, "control"):
                        answers += self._agree(step, f"{current.title}: {step.what}", data, now)
                if position == len(self.instructions) - 1:
                    self.recorder.read_marks()  # waits for the device: an iteration ends when its last kernel does
            except UserError:
                raise
            except RuntimeError as error:  # those of torch.distributed are
                raise peer_error(error, self.program, self.world, current, step, position) from error
        self.world.progress(f"{current.title}: over", current.number)
        return answers

    def _agree(self, step: Agree, meeting: str, data: Any, now: Any) -> list[dict[str, Any]]:
        """Executes an Agree. Returns the messages of all ranks, if they meet."""
        if data is None:
            self.world.barrier(meeting)
        elif step.ranks:
            self.is_full = self.agree_among(data, step)
        elif self.program.chains and now is not None:
            self.report(data)
        else:
            return self.agree(data, meeting)
        return []

    @abstractmethod
    def reset(self) -> None:
        """Resets the state of an iteration, before its first instruction."""

    @abstractmethod
    def run(self, run: Run, data: Any) -> Callable[[], None] | None:
        """Computes a Run. Returns its remaining part, and records its own spans, if any."""

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

    @abstractmethod
    def report(self, data: Any) -> None:
        """Sends such a message in a chain, without waiting for anybody."""

    @abstractmethod
    def agree_among(self, data: Any, step: Agree) -> bool:
        """Agrees with some ranks on the next state, or on groups to sample again. Returns whether a batch is full."""


def _current(program: Program, now: Any, before: Any) -> Current:
    """Returns the iteration of a list, given the data of its iterations."""
    if before is None or (program.chains and now is not None):
        return Current(now.number, "drawing " * program.placement.ahead + now.title)
    if program.chains:
        return Current(before.number + 1, f"end of {before.title}")
    return Current(before.number, before.title if now is None else f"{before.title}, sampling {now.number + 1}")
