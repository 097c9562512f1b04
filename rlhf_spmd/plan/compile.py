"""Workload + placement -> program. Pure, deterministic, the same on every rank.

All instructions are emitted in one global order (calls as the algorithm states them; training by epoch and
mini-batch), each to the ranks that take part. Transfers are posted right after the call that makes their data and
waited for right before the first call that reads it, so that whatever lies between overlaps with them.
"""

from dataclasses import dataclass, field

from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout, format_ranks
from rlhf_spmd.plan.placement import Placement, group_of, validate
from rlhf_spmd.plan.program import Agree, Instruction, Message, Post, Program, Run, Transfer, Wait
from rlhf_spmd.plan.workflow import Call
from rlhf_spmd.plan.workload import Workload


def compile_program(workload: Workload, placement: Placement, cluster: Cluster) -> Program:
    """Compiles one iteration. Raises UserError if the placement does not fit the workload or the cluster."""
    validate(placement, workload, cluster)
    compiler = _Compiler(workload, placement, cluster)
    compiler.plan_transfers()
    compiler.emit()
    return Program(
        workload,
        placement,
        cluster,
        compiler.groups,
        tuple(compiler.transfers),
        tuple(tuple(instructions) for instructions in compiler.instructions),
    )


def layouts_of(call: Call, workload: Workload, placement: Placement) -> tuple[Layout, ...]:
    """Where a call runs: its layout, or for a `compute` every distinct list of ranks that reads its results."""
    return tuple(placement.layouts[site] for site in placement.sites(call, workload.workflow))


@dataclass(slots=True)
class _Compiler:
    workload: Workload
    placement: Placement
    cluster: Cluster
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    instructions: list[list[Instruction]] = field(default_factory=list)
    posts: dict[str, list[int]] = field(default_factory=dict)  # producer call -> transfers
    waits: dict[str, list[int]] = field(default_factory=dict)  # consumer call -> transfers it needs
    held: dict[tuple[str, int], set[int]] = field(default_factory=dict)  # key, rank -> columns there by now

    def plan_transfers(self) -> None:
        """Finds what each call lacks where it runs, and which rank has it."""
        for call in self.workload.workflow.calls:
            layouts = layouts_of(call, self.workload, self.placement)
            for layout in layouts:
                self._plan_moves(call, layout)
            for layout in layouts:  # what is made stays where it is made
                for rank in layout.ranks:
                    for key in call.outputs:
                        self._columns_held(key, rank).update(layout.columns(rank, self.workload.mini_batch))
        self._plan_weights()

    def _columns_held(self, key: str, rank: int) -> set[int]:
        return self.held.setdefault((key, rank), set())

    def _plan_moves(self, call: Call, layout: Layout) -> None:
        """Adds the transfers of what `call` reads and the ranks of `layout` do not hold yet; keys that one call makes
        and that are lacking in the same places travel together."""
        moves: dict[tuple[str, tuple], list[str]] = {}
        for key in call.inputs:
            producer = self.workload.workflow.producer(key)
            if producer is None:
                continue  # given keys are on every rank
            lacking = []
            for rank in layout.ranks:
                held = self._columns_held(key, rank)
                columns = [c for c in layout.columns(rank, self.workload.mini_batch) if c not in held]
                lacking += [(rank, tuple(columns))] if columns else []
                held.update(columns)
            if lacking:
                moves.setdefault((producer.name, tuple(lacking)), []).append(key)
        for (producer_name, lacking), keys in moves.items():
            messages = self._messages(self.workload.workflow.call(producer_name), tuple(keys), lacking)
            what = f"{', '.join(keys)} to ranks {format_ranks(layout.ranks)}"
            self._add(Transfer(what, layout.ranks, tuple(keys), messages), producer_name, call.name)

    def _messages(self, producer: Call, keys: tuple[str, ...], lacking: tuple) -> tuple[Message, ...]:
        """From where `producer` runs to each (rank, columns): one message per run of columns with the same owner."""
        source = layouts_of(producer, self.workload, self.placement)[0]
        owner = {c: rank for rank in source.ranks for c in source.columns(rank, self.workload.mini_batch)}
        column_bytes = self.workload.num_mini_batches * sum(self.workload.row_bytes(key) for key in keys)
        messages = []
        for destination, columns in lacking:
            start = 0
            for stop in range(1, len(columns) + 1):
                first, last = columns[start], columns[stop - 1]
                if stop < len(columns) and columns[stop] == last + 1 and owner[columns[stop]] == owner[first]:
                    continue
                size = (last + 1 - first) * column_bytes
                messages.append(Message(owner[first], destination, range(first, last + 1), size))
                start = stop
        return tuple(messages)

    def _plan_weights(self) -> None:
        """New weights go from where a model trains to every other rank that uses it, a same-node sender first."""
        for call in self.workload.workflow.placed_calls:
            if call.kind != "train":
                continue
            home = self.placement.layouts[call.name]
            users = [c for c in self.workload.workflow.placed_calls if c.model == call.model]
            shadows = sorted({r for c in users for r in self.placement.layouts[c.name].ranks} - set(home.ranks))
            load = dict.fromkeys(home.ranks, 0)
            nodes = {rank: self.cluster.node_of(rank) for rank in (*home.ranks, *shadows)}
            near = {nodes[rank] for rank in home.ranks}
            messages = []
            for rank in sorted(shadows, key=lambda r: nodes[r] not in near):  # who has a choice comes last
                sender = min(home.ranks, key=lambda r: (nodes[r] != nodes[rank], load[r], r))
                load[sender] += 1
                messages.append(Message(sender, rank, range(0), self.workload.weight_bytes(call.model)))
            if messages:
                what = f"weights of {call.model} to ranks {format_ranks(tuple(shadows))}"
                self._add(Transfer(what, tuple(shadows), (), tuple(messages), model=call.model), call.name, None)

    def _add(self, transfer: Transfer, producer: str, consumer: str | None) -> None:
        number = len(self.transfers)
        self.transfers.append(transfer)
        self.posts.setdefault(producer, []).append(number)
        if consumer is not None:
            self.waits.setdefault(consumer, []).append(number)

    def emit(self) -> None:
        """Writes the instruction lists."""
        self.instructions = [[] for _ in self.cluster.ranks]
        waited: set[tuple[int, int]] = set()
        calls = self.workload.workflow.calls
        for call in calls:
            self._emit_waits(call, waited)
            if call.kind == "train":
                continue
            for site in self.placement.sites(call, self.workload.workflow):
                layout = self.placement.layouts[site]
                reader = site if call.kind == "compute" else None
                self._emit(layout.ranks, Run(call.name, self._group(call, layout), reader=reader))
            self._emit_posts(call)
        trains = [call for call in calls if call.kind == "train"]
        for epoch in range(self.workload.epochs):
            for mini_batch in range(self.workload.num_mini_batches):
                for call in trains:
                    layout = self.placement.layouts[call.name]
                    self._emit(layout.ranks, Run(call.name, self._group(call, layout), mini_batch, epoch))
        for call in trains:
            self._emit_posts(call)
        for number, transfer in enumerate(self.transfers):  # senders keep their buffers until here
            for rank in transfer.ranks:
                if (rank, number) not in waited:
                    self.instructions[rank].append(Wait(number))
        self._emit(self.cluster.ranks, Agree("metrics"))

    def _emit(self, ranks, instruction: Instruction) -> None:
        for rank in ranks:
            self.instructions[rank].append(instruction)

    def _emit_waits(self, call: Call, waited: set[tuple[int, int]]) -> None:
        for number in self.waits.get(call.name, []):
            for rank in dict.fromkeys(message.destination for message in self.transfers[number].messages):
                if (rank, number) not in waited:
                    waited.add((rank, number))
                    self.instructions[rank].append(Wait(number))

    def _emit_posts(self, call: Call) -> None:
        for number in self.posts.get(call.name, []):
            self._emit(self.transfers[number].ranks, Post(number))

    def _group(self, call: Call, layout: Layout) -> str | None:
        """The group whose collectives a Run enters, which the program then has."""
        group = group_of(call, layout, self.workload, self.placement)
        if group is not None:
            self.groups.setdefault(group, layout.ranks)
        return group
