"""The program: an ordered list of instructions for every rank. It is executed, checked, simulated and drawn.

The semantics that the executor (runtime/execute/executor.py) and the proof (plan/proof/check.py) share:

Run       computes a call on this rank's columns (or some of them) of one mini-batch (or of all). If it names a group,
          it contains collectives: every rank of the group must enter the same Run, in the same order.
Post      starts this rank's part of a transfer (its sends and receives) without blocking.
Wait      blocks until this rank's part of a posted transfer is done, which needs the Posts of all peers. Weights move
          in buckets along chains of ranks: Post starts the first buckets, and all ranks of the chains meet at the Wait.
Load      brings the weights of a frozen model from host memory to the device; Offload frees them there.
Agree     is a control message among all ranks (MPI), at the end of an iteration. In a chain of iterations (chain.py)
          ranks do not wait for it, and some of them agree on the state of the next iteration where they can. Another
          begins a round of sampling (rounds.py), which is skipped where no group remains to sample.

A Run in a layout with stages (pp > 1) is one instruction here. Once the number of micro-batches (in generation: of
tokens) is known, pipeline.py compiles it into a Run for each pass and the Posts and Waits between stages.

Messages between calls go through the world's communicator; between GPUs, rows go through a second one in host memory
(see transfers.py). Messages between the stages of a call, and collectives, have a communicator for each distinct
set of ranks and purpose (layout.group_name): NCCL executes each communicator strictly in order, so a receive that is
posted early would delay a stage's send behind it.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

from rlhf_spmd.plan.calls import Call, Compute, Measure, Train
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import HOST, STAGES, Layout, format_ranks, group_name
from rlhf_spmd.plan.placement import Placement, uses_trained_weights
from rlhf_spmd.plan.program.reallocate import Reallocation
from rlhf_spmd.plan.program.stable_text import stable_text
from rlhf_spmd.plan.runtime_words import ACTIONS, ROUTES
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.plan.workload import Workload

WORLD = "world"  # beside HOST and STAGES: the communicator of messages between calls
BUCKET_BYTES = 64 * 2**20  # of weights in transit: large enough for bandwidth, small enough to overlap


@dataclass(frozen=True, slots=True)
class Run:
    call: str
    group: str | None = None
    mini_batch: int | None = None  # None: all mini-batches
    epoch: int = 0
    consumer: str | None = None  # of a compute: the call that reads its results and whose layout it uses
    columns: range | None = None  # None: all columns that this rank has in the layout
    phase: str = ""  # of a pipeline: begin | forward, backward of a micro-batch | update; or as token_body says
    micro_batch: int | None = None  # in generation the token
    iteration: int = 0  # in a list of several iterations (chain.py)
    delay: int = field(default=0, compare=False)  # 1: of the iteration before (chain.py, ahead.py)
    round: int = 0  # of drawing (rounds.py)

    def __str__(self) -> str:
        where = f" {self.phase}" if self.phase else ""
        unit = " " if self.phase in ("token", "drawn", "answers") else " of micro-batch "
        where += "" if self.micro_batch is None else f"{unit}{self.micro_batch}"
        where += "" if self.mini_batch is None else f" epoch {self.epoch} mini-batch {self.mini_batch}"
        where += "" if self.columns is None else f" columns {self.columns.start}-{self.columns.stop - 1}"
        where += f" for {self.consumer}" if self.consumer else ""
        where += f" round {self.round + 1}" if self.round else ""
        return f"Run {self.call}{where}" + (f" with {self.group}" if self.group else "")


@dataclass(frozen=True, slots=True)
class _OfTransfer:
    transfer: int
    delay: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{type(self).__name__} transfer {self.transfer}"


class Post(_OfTransfer):
    """Starts this rank's part of a transfer."""

    __slots__ = ()


class Wait(_OfTransfer):
    """Ends with this rank's part of a transfer."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class _OfModel:
    model: str
    delay: ClassVar[int] = 0

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.model}"


class Load(_OfModel):
    """Brings the weights of a frozen model to the device."""

    __slots__ = ()


class Offload(_OfModel):
    """Frees the weights of a frozen model on the device."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Agree:
    what: str
    ranks: tuple[int, ...] = ()  # that take part; empty: all
    delay: int = field(default=0, compare=False)  # in a chain nobody waits for a delayed one
    round: int = 0  # that it begins

    def __str__(self) -> str:
        return f"Agree on {self.what}"


Instruction = Run | Post | Wait | Load | Offload | Agree
INSTRUCTIONS = frozenset({Run, Post, Wait, Load, Offload, Agree})


@dataclass(frozen=True, slots=True)
class Message:
    """Rows (some columns) of data keys, or without keys: a model's weights, or a notice; from one rank to another."""

    source: int
    destination: int
    keys: tuple[str, ...]
    columns: range
    num_bytes: int
    num_parts: int = 1  # messages on the wire: weights travel in buckets
    through_host: bool = False  # copied to host memory, sent from there, and copied to the other device


@dataclass(frozen=True, slots=True)
class Transfer:
    """One move between layouts: data keys of one mini-batch (None: of all), or the weights of a `model`; then a message
    sums up all that goes from one rank to another. All its messages go through one communicator."""

    what: str
    messages: tuple[Message, ...]
    model: str | None = None
    mini_batch: int | None = None
    reallocation: Reallocation | None = None  # of weights
    call: str | None = None  # between the stages of this call, in their groups; None: between calls, in the world
    round: int = 0  # of drawing
    ranks: tuple[int, ...] = field(init=False, repr=False, compare=False)  # that take part
    communicator: str = field(init=False, repr=False, compare=False)  # WORLD, HOST or STAGES, each with its own order
    _sent: dict[int, list[Message]] = field(init=False, repr=False, compare=False)
    _received: dict[int, list[Message]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sent: dict[int, list[Message]] = {}
        received: dict[int, list[Message]] = {}
        for message in self.messages:
            sent.setdefault(message.source, []).append(message)
            received.setdefault(message.destination, []).append(message)
        moved = self.reallocation
        local = {moved.targets[copy.target][0] for copy in moved.local} if moved else set()
        object.__setattr__(self, "ranks", tuple(sorted({*local, *sent, *received})))
        through_host = any(message.through_host for message in self.messages)
        between_calls = HOST if through_host else WORLD
        object.__setattr__(self, "communicator", STAGES if self.call is not None else between_calls)
        object.__setattr__(self, "_sent", sent)
        object.__setattr__(self, "_received", received)

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys that some message carries."""
        return tuple(dict.fromkeys(key for message in self.messages for key in message.keys))

    @property
    def num_messages(self) -> int:
        return sum(message.num_parts for message in self.messages)

    @property
    def num_bytes(self) -> int:
        return sum(message.num_bytes for message in self.messages)

    def peers(self, rank: int) -> set[int]:
        """Returns the ranks with which this rank exchanges something."""
        return {m.source for m in self.received_by(rank)} | {m.destination for m in self.sent_by(rank)}

    def sent_by(self, rank: int) -> Sequence[Message]:
        """Returns the messages that leave a rank."""
        return self._sent.get(rank, ())

    def received_by(self, rank: int) -> Sequence[Message]:
        """Returns the messages that come to a rank."""
        return self._received.get(rank, ())


@dataclass(frozen=True, slots=True)
class Program:
    """What every rank executes in one iteration. Every rank computes the same object."""

    workload: Workload
    placement: Placement
    cluster: Cluster
    groups: Mapping[str, tuple[int, ...]]  # created once, in this order, on every rank
    transfers: tuple[Transfer, ...]
    instructions: tuple[tuple[Instruction, ...], ...]  # [rank][position]

    @property
    def fingerprint(self) -> str:
        """Hash of everything that ranks must agree on before the first collective. It names no class, so that a run
        goes on with a later version."""
        return hashlib.sha256(stable_text(self, INSTRUCTIONS).encode()).hexdigest()[:16]

    @property
    def overlaps(self) -> bool:
        """Whether the lists have instructions of the iteration before (chain.py, ahead.py)."""
        return self.chains or self.placement.ahead > 0

    @property
    def chains(self) -> bool:
        """Whether iterations follow one another without a meeting (chain.py)."""
        return self.placement.chains(self.workload)

    def layout_of(self, run: Run) -> Layout:
        """Returns the layout of a Run; a rank may run a compute once for each consumer, on other columns."""
        return self.placement.layouts[run.consumer or run.call]

    def columns_of(self, run: Run, rank: int) -> range:
        """Returns the columns that a Run computes on a rank."""
        return self.layout_of(run).columns(rank, self.workload.mini_batch) if run.columns is None else run.columns

    def columns_seen(self, run: Run, rank: int) -> range:
        """Returns the columns that a Run reads on a rank: more than it computes if it must see other rows."""
        return self.workload.columns_seen(self.workload.workflow.call(run.call), self.columns_of(run, rank))

    def reads(self, run: Run, rank: int) -> tuple[str, ...]:
        """Returns the data keys that a Run reads on a rank."""
        return keys_read(self.workload.workflow.call(run.call), self.layout_of(run), rank)

    def makes(self, run: Run, rank: int) -> tuple[str, ...]:
        """Returns the data keys that a Run makes on a rank."""
        return keys_made(self.workload.workflow.call(run.call), self.layout_of(run), rank)

    def gains(self, instruction: Instruction, rank: int) -> list[tuple[str, range, range]]:
        """Returns the data that a rank gains by an instruction: keys with their mini-batches and columns."""
        if isinstance(instruction, Run):
            rows, columns = self.mini_batches_of(instruction), self.columns_of(instruction, rank)
            return [(key, rows, columns) for key in self.makes(instruction, rank)]
        if isinstance(instruction, Wait):
            moved = self.transfers[instruction.transfer]
            rows = self.mini_batches_of(moved)
            return [(key, rows, message.columns) for message in moved.received_by(rank) for key in message.keys]
        return []

    def mini_batches_of(self, run_or_transfer: Run | Transfer) -> range:
        """Returns the mini-batches that a Run computes or a transfer moves."""
        one = run_or_transfer.mini_batch
        return range(self.workload.num_mini_batches) if one is None else range(one, one + 1)

    def moves_weights(self, instruction: Instruction) -> bool:
        """Returns whether this is the Wait of a reallocation."""
        return isinstance(instruction, Wait) and self.transfers[instruction.transfer].reallocation is not None

    def together(self, rank: int, instruction: Instruction) -> tuple[int, ...]:
        """Returns the ranks that meet at an instruction of this rank: none of them ends it before all have begun it."""
        if isinstance(instruction, Run) and instruction.group is not None:
            return self.groups[instruction.group]
        if isinstance(instruction, Agree):
            return instruction.ranks or tuple(range(len(self.instructions)))
        if isinstance(instruction, Wait) and self.moves_weights(instruction):
            return self.transfers[instruction.transfer].ranks
        return (rank,)

    def meets(self, rank: int, instruction: Instruction) -> tuple[Instruction, tuple[int, ...]]:
        """Returns the instruction that other ranks must begin before this rank can end its own, and those ranks. A
        transfer of data needs the Posts of its peers, whose Waits may come much later."""
        if isinstance(instruction, Post | Wait) and not self.moves_weights(instruction):
            return Post(instruction.transfer), tuple(sorted(self.transfers[instruction.transfer].peers(rank)))
        return instruction, tuple(other for other in self.together(rank, instruction) if other != rank)

    def held(self, rank: int) -> dict[str, tuple[range, ...]]:
        """Returns the columns of each data key that a rank has in an iteration, as `merged` ranges."""
        held: dict[str, set[range]] = {}
        for instruction in self.instructions[rank]:
            if isinstance(instruction, Run):
                for key in self.reads(instruction, rank):
                    held.setdefault(key, set()).add(self.columns_seen(instruction, rank))
            for key, _, columns in self.gains(instruction, rank):
                held.setdefault(key, set()).add(columns)
        return {key: merged(ranges) for key, ranges in held.items()}

    def trained(self, rank: int) -> tuple[str, ...]:
        """Returns the models that train on a rank."""
        calls = self.workload.workflow.placed_calls
        return tuple(c.model for c in calls if isinstance(c, Train) and rank in self.placement.layouts[c.name].ranks)

    def copies(self, rank: int) -> dict[tuple[str, Shard], tuple[str, ...]]:
        """Returns the copies of weights on a rank that it does not train: model and shard -> the calls that use it."""
        users: dict[tuple[str, Shard], tuple[str, ...]] = {}
        for call in self.workload.workflow.placed_calls:
            layout = self.placement.layouts[call.name]
            if rank in layout.ranks and not uses_trained_weights(call, rank, self.workload, self.placement):
                key = call.model, layout.shard(rank)
                users[key] = (*users.get(key, ()), call.name)
        return users

    @property
    def host_group(self) -> str | None:
        """The group whose messages go through host memory; None: no message does."""
        name = group_name(self.cluster.ranks, HOST)
        return name if name in self.groups else None

    @property
    def pairs(self) -> dict[str | None, list[tuple[int, int]]]:
        """The pairs of ranks, ascending, that exchange messages in each group that must be connected; None: between
        calls, in the world."""
        between = {
            (m.source, m.destination) for transfer in self.transfers for m in transfer.messages if not m.through_host
        }
        pairs: dict[str | None, set[tuple[int, int]]] = {None: {(min(pair), max(pair)) for pair in between}}
        for layout in dict.fromkeys(self.placement.layouts.values()):
            for rank in layout.ranks if layout.pp > 1 else ():
                stages = layout.stage_ranks(rank)
                pairs.setdefault(group_name(stages, STAGES), set()).update(pairwise(stages))
        return {name: sorted(some) for name, some in pairs.items()}

    def describe(self, transfer: int) -> str:
        """Describes a transfer in words."""
        move = self.transfers[transfer]
        return f"{move.what} among ranks {format_ranks(move.ranks)}, {move.num_bytes:,} bytes"


def keys_read(call: Call, layout: Layout, rank: int) -> tuple[str, ...]:
    """Returns the data keys that a call reads on a rank: a stage before the last needs tokens, their routes,
    and which rows count."""
    if isinstance(call, Compute) or layout.coordinates(rank)[1] == layout.pp - 1:
        return call.inputs
    needed = (*call.tokens, call.only) if isinstance(call, Train | Measure) else call.tokens
    return tuple(key for key in call.inputs if key in needed or key.endswith((ACTIONS, ROUTES)))


def keys_made(call: Call, layout: Layout, rank: int) -> tuple[str, ...]:
    """Returns the data keys that a call makes on a rank: the last stage has the results."""
    return call.outputs if layout.coordinates(rank)[1] == layout.pp - 1 else ()


def merged(ranges: Iterable[range]) -> tuple[range, ...]:
    """Merges numbers given as ranges to ascending ranges that neither meet nor overlap."""
    runs: list[range] = []
    for one in sorted(filter(None, ranges), key=lambda one: one.start):
        if runs and one.start <= runs[-1].stop:
            one = range(runs[-1].start, max(runs.pop().stop, one.stop))
        runs.append(one)
    return tuple(runs)
