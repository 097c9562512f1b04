"""The rehearsal of a program on one rank: the real list of instructions, with stages expanded, in the real loop.

A Run sleeps for the seconds of its forecast, divided by a factor. Rows have one number for each key and column, which
a rank may read only after it made or received it; weights travel in a few small buckets along the real chains. The body
of generation through stages is expanded for a few tokens, which take no time, and its end takes that of all of them.
"""

import math
import os
import signal
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.calls import Compute, Generate
from rlhf_spmd.plan.cost.simulate import Times
from rlhf_spmd.plan.layout import HOST, STAGES, group_name
from rlhf_spmd.plan.program.instructions import WORLD, Agree, Load, Message, Offload, Program, Run, Transfer
from rlhf_spmd.plan.program.pipeline import expand, usual_number
from rlhf_spmd.plan.program.reallocate import Reallocation
from rlhf_spmd.runtime.execute.instruction_loop import InstructionLoop
from rlhf_spmd.runtime.rehearse.communicators import Communicators, Operation, Part
from rlhf_spmd.runtime.world.trace import Tracer

NUM_TOKENS = 8  # of generation through stages; the others take only time
MOST_BUCKETS = 4  # of weights on a chain
WEIGHTS = "weights"  # where the ranks of a reallocation meet
NAMES = 2**31  # of messages and meetings; a float64 holds them exactly


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong in a rehearsal. kill: a rank, and the call in which it gets SIGKILL. slow: rank -> how many times
    longer it computes. drop: the messages of the first transfer whose name contains this text are lost."""

    kill: tuple[int, str] | None = None
    slow: tuple[tuple[int, float], ...] = ()
    drop: str | None = None

    def slowness(self, rank: int) -> float:
        """Returns how many times longer a rank computes."""
        return dict(self.slow).get(rank, 1.0)


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """One iteration. rows: a number for each row of a key [M, C], NaN where this rank has none. sent_bytes: by node of
    the sender and of the receiver."""

    number: int  # from 0; people count from 1
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    sent_bytes: Counter[tuple[int, int]] = field(default_factory=Counter)

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"iteration {self.number + 1}"


def expanded(program: Program) -> Program:
    """Returns the program whose lists are rehearsed: with the bodies of Runs with stages."""
    return expand(program, lambda run: usual_number(program, run), lambda run: NUM_TOKENS)


class Rehearsal(InstructionLoop):
    """Carries out the instructions by sleeping, and by small messages over MPI."""

    def __init__(self, program: Program, world: Any, recorder: Tracer, times: Times, factor: float, faults: Faults):
        """Prepares the rehearsal of a program.

        program: `expanded`.
        times: its forecast's.
        factor: seconds of the forecast in a second here.
        """
        super().__init__(program, world, recorder)
        self.times, self.factor, self.faults = times, factor, faults
        names = dict.fromkeys([*program.groups, WORLD, WEIGHTS])
        self.communicators = Communicators(world.messages(), names, world.watch.beat)
        workload = program.workload
        self.shape = workload.num_mini_batches, workload.mini_batch
        self.given = {key for call in workload.workflow.calls for key in call.inputs} - {
            key for call in workload.workflow.calls for key in call.outputs
        }
        self.pending: dict[int, Operation] = {}
        self._loaded: dict[str, float] = {}  # model -> when its weights are on the device
        self.chains: dict[int, Iterator[Operation]] = {}  # transfer of weights -> its steps that are left
        name = faults.drop or "\n"
        named = (number for number, moved in enumerate(program.transfers) if name in moved.what)
        self.dropped = next(named, None)
        self.begin()

    def report(self, data: Rehearsed) -> None:
        """Tells nothing: the forecast is compared with the seconds of rank 0."""

    def agree_among(self, data: Rehearsed, step: Agree) -> bool:
        """Meets some ranks; no batch is full before the last round."""
        if self.reports is None:
            self.world.barrier(f"{data.title}: {step.what}")
        else:
            self.reports.merge(step.ranks, None, len)
        return False

    def reset(self) -> None:
        """Nothing is left of the iteration before."""

    # ---- Runs -------------------------------------------------------------------------------------------------------

    def run(self, run: Run, data: Rehearsed) -> None:
        """Reads rows, meets the ranks of the Run, sleeps, and makes rows."""
        rank = self.world.rank
        if self.faults.kill == (rank, run.call):
            os.kill(os.getpid(), signal.SIGKILL)
        self._read(run, data)
        call = self.program.workload.workflow.call(run.call)
        if not isinstance(call, Compute):
            self.communicators.work(self._loaded.get(call.model, 0.0))
        seconds = self._seconds(run)
        members = self.program.groups[run.group] if run.group else (rank,)
        if len(members) > 1:
            assert run.group is not None
            meeting = Operation(name=self._name(f"{run}", data), members=tuple(members), seconds=seconds)
            self.communicators.finish(self.communicators.start(run.group, meeting))
        else:
            self.communicators.work(time.monotonic() + seconds)
        if run.phase != "begin":
            rows, columns = self.program.mini_batches_of(run), self.program.columns_of(run, rank)
            for key in self.program.makes(run, rank):
                self._values(key, data)[rows.start : rows.stop, columns.start : columns.stop] = self._expected(
                    key, rows, columns, data
                )

    def _seconds(self, run: Run) -> float:
        """Returns seconds that this rank sleeps for a Run."""
        call = self.program.workload.workflow.call(run.call)
        if isinstance(call, Generate) and run.phase:
            if run.phase != "end":
                return 0.0
            run = replace(run, phase="", micro_batch=None)
        return self.times.run_s(self.world.rank, run) * self.faults.slowness(self.world.rank) / self.factor

    def _read(self, run: Run, data: Rehearsed) -> None:
        """Raises UserError if a row that a Run reads is not there."""
        rows, columns = self.program.mini_batches_of(run), self.program.columns_seen(run, self.world.rank)
        for key in self.program.reads(run, self.world.rank):
            if key in self.given:
                continue
            found = self._values(key, data)[rows.start : rows.stop, columns.start : columns.stop]
            if not np.array_equal(found, self._expected(key, rows, columns, data)):
                where = f"columns {columns.start}-{columns.stop - 1} of mini-batches {rows.start}-{rows.stop - 1}"
                raise UserError(f"rank {self.world.rank} reads {key} in {run}, but has not received all {where}")

    def _values(self, key: str, data: Rehearsed) -> np.ndarray:
        if key not in data.rows:
            data.rows[key] = np.full(self.shape, math.nan)
        return data.rows[key]

    def _expected(self, key: str, rows: range, columns: range, data: Rehearsed) -> np.ndarray:
        """Returns the numbers of some rows in an iteration."""
        places_MC = np.add.outer(np.array(rows) * self.shape[1], np.array(columns))
        return places_MC + (data.number + 1) * 1e6 + zlib.crc32(key.encode()) % 1000 * 1e9

    # ---- messages ---------------------------------------------------------------------------------------------------

    def post(self, number: int, data: Rehearsed) -> None:
        """Starts this rank's part of a transfer."""
        transfer = self.program.transfers[number]
        self._count(transfer, data)
        if transfer.reallocation is not None:
            self.chains[number] = self._steps(number, transfer.reallocation, data)
            self.pending[number] = self.communicators.start(WORLD, next(self.chains[number]))
            return
        parts = [
            self._part(number, place, message, data)
            for place, message in enumerate(transfer.messages)
            if self.world.rank in (message.source, message.destination)
        ]
        self.pending[number] = self.communicators.start(self._communicator(transfer), Operation(parts))

    def wait(self, number: int, data: Rehearsed) -> None:
        """Waits until this rank's part of a transfer is done, and keeps what arrived."""
        transfer = self.program.transfers[number]
        if number not in self.pending:
            raise UserError(f"rank {self.world.rank} waits for transfer {number} ({transfer.what}) before it is posted")
        if transfer.reallocation is not None:
            self._wait_for_weights(number, transfer, data)
            return
        operation = self.pending.pop(number)
        self.communicators.finish(operation)
        rows = self.program.mini_batches_of(transfer)
        for part, message in zip(operation.parts, self._mine(transfer), strict=True):
            shape = len(rows), len(message.columns)
            for index, key in enumerate([] if part.sends or transfer.call is not None else message.keys):
                numbers = part.numbers[index * shape[0] * shape[1] :][: shape[0] * shape[1]].reshape(shape)
                columns = message.columns
                self._values(key, data)[rows.start : rows.stop, columns.start : columns.stop] = numbers

    def _mine(self, transfer: Transfer) -> list[Message]:
        return [m for m in transfer.messages if self.world.rank in (m.source, m.destination)]

    def _part(self, number: int, place: int, message: Message, data: Rehearsed) -> Part:
        """Returns this rank's end of a message of rows, or of what a stage sends to the next."""
        transfer, sends = self.program.transfers[number], message.source == self.world.rank
        rows, columns = self.program.mini_batches_of(transfer), message.columns
        keys = message.keys if transfer.call is None else ()
        numbers = np.full(len(keys) * len(rows) * len(columns), math.nan)
        if sends and keys:
            held = [self._values(key, data)[rows.start : rows.stop, columns.start : columns.stop] for key in keys]
            numbers = np.concatenate([some.ravel() for some in held])
        return Part(
            name=self._name(f"{number} {place}", data),
            peer=message.destination if sends else message.source,
            sends=sends,
            seconds=self.times.message_s(message) / self.factor,
            numbers=numbers,
            wire=HOST if message.through_host else WORLD,
            what=transfer.what,
            is_lost=number == self.dropped,
        )

    def _communicator(self, transfer: Transfer) -> str:
        if transfer.call is not None:
            return group_name(self.program.placement.layouts[transfer.call].stage_ranks(self.world.rank), STAGES)
        return (self.program.host_group or HOST) if transfer.communicator == HOST else WORLD

    def _count(self, transfer: Transfer, data: Rehearsed) -> None:
        node_of = self.program.cluster.node_of
        for message in transfer.sent_by(self.world.rank):
            data.sent_bytes[node_of(message.source), node_of(message.destination)] += message.num_bytes

    def _name(self, text: str, data: Rehearsed) -> int:
        """Returns a number for a message or meeting of an iteration, the same on all its ranks."""
        return zlib.crc32(f"{data.number} {text}".encode()) % NAMES

    # ---- weights ----------------------------------------------------------------------------------------------------

    def _wait_for_weights(self, number: int, transfer: Transfer, data: Rehearsed) -> None:
        """Makes the ranks of a reallocation meet, which takes its seconds; then the buckets go on, one step after
        another."""
        members, operation = transfer.ranks, self.pending.pop(number)
        if len(members) > 1:
            meeting = Operation(name=self._name(f"{number}", data), members=members, seconds=self._moved_s(transfer))
            self.communicators.finish(self.communicators.start(WEIGHTS, meeting))
        self.communicators.finish(operation)
        for step in self.chains.pop(number):
            self.communicators.finish(self.communicators.start(WORLD, step))

    def _moved_s(self, transfer: Transfer) -> float:
        """Returns seconds in which this rank sends, or receives, its weights."""
        sent_s, received_s = (
            sum(map(self.times.message_s, some(self.world.rank))) for some in (transfer.sent_by, transfer.received_by)
        )
        return max(sent_s, received_s) / self.factor

    def _steps(self, number: int, plan: Reallocation, data: Rehearsed) -> Iterator[Operation]:
        """Yields the steps of runtime/weights/weight_mover.py: at step t the link h of a chain carries bucket t - h."""
        rank = self.world.rank
        routes = [(index, route) for index, route in enumerate(plan.routes) if rank in route.ranks]
        sizes = {index: max(1, min(route.num_numbers // 100, MOST_BUCKETS)) for index, route in routes}
        last = max((sizes[index] + len(route.ranks) for index, route in routes), default=0)
        for step in range(last + 1):
            parts = []
            for index, route in routes:
                place = route.ranks.index(rank)
                for link in (place - 1, place):  # from the one before, to the next one
                    bucket = step - link
                    if 0 <= link < len(route.ranks) - 1 and 0 <= bucket < sizes[index]:
                        name = self._name(f"{number} {index} {link} {bucket}", data)
                        peer, what = route.ranks[place + 1 if link == place else place - 1], "weights"
                        is_lost = number == self.dropped
                        parts.append(Part(name, peer, link == place, 0.0, np.zeros(1), WORLD, what, is_lost))
            yield Operation(parts)

    # ---- the rest ---------------------------------------------------------------------------------------------------

    def load(self, load: Load) -> None:
        """Begins to load a model, beside the Runs of others."""
        self._loaded[load.model] = time.monotonic() + self.times.load_s(self.world.rank, load) / self.factor

    def offload(self, offload: Offload) -> None:
        """Takes no time."""

    def agree(self, data: Rehearsed, what: str) -> list[dict[str, Any]]:
        """Exchanges among all ranks what they sent: nodes of sender and receiver, bytes."""
        sent = [[*link, size] for link, size in data.sent_bytes.items()]
        answers: list[dict[str, Any]] = self.world.allgather({"sent_bytes": sent}, what)
        return answers
