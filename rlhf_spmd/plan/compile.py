"""Workload + placement -> program. Pure, deterministic, the same on every rank.

All instructions are emitted in one global order (calls as the algorithm states them; training by epoch and
mini-batch), each to the ranks that take part. Transfers are posted right after the call that makes their data and
waited for right before the first call that reads it, so that whatever lies between overlaps with them.
"""

from dataclasses import dataclass, field

from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout, format_ranks
from rlhf_spmd.plan.placement import Placement, validate
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
    """Where a call runs: its layout, or for a `compute` every distinct set of ranks that consumes its outputs."""
    if call.kind != "compute":
        return (placement.layouts[call.name],)
    found: dict[tuple[int, ...], Layout] = {}
    for consumer in workload.workflow.consumers(call.outputs):
        for layout in layouts_of(consumer, workload, placement):
            found.setdefault(layout.ranks, layout)
    return tuple(found.values())


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

    def plan_transfers(self) -> None:
        """Finds what each call lacks where it runs, and which rank has it."""
        workflow = self.workload.workflow
        for call in workflow.calls:
            for layout in layouts_of(call, self.workload, self.placement):
                by_producer: dict[str, list[str]] = {}
                for key in call.inputs:
                    producer = workflow.producer(key)
                    if producer is not None:  # given keys are on every rank
                        by_producer.setdefault(producer.name, []).append(key)
                for producer_name, keys in by_producer.items():
                    self._plan_move(workflow.call(producer_name), tuple(keys), call, layout)
        self._plan_weights()

    def _plan_move(self, producer: Call, keys: tuple[str, ...], call: Call, layout: Layout) -> None:
        """Adds the transfer of `keys` from where they are made to `layout`, unless they are there already."""
        sources = layouts_of(producer, self.workload, self.placement)
        if layout.ranks in {source.ranks for source in sources}:
            return  # made in place
        for number in self.posts.get(producer.name, []):  # sent there already for an earlier call?
            move = self.transfers[number]
            if move.to == layout.ranks and set(keys) <= set(move.keys):
                self.waits.setdefault(call.name, []).append(number)
                return
        source = sources[0]
        row_bytes = sum(self.workload.row_bytes(key) for key in keys)
        messages = []
        for destination in layout.ranks:
            need = layout.columns(destination, self.workload.mini_batch)
            for rank in source.ranks:
                has = source.columns(rank, self.workload.mini_batch)
                common = range(max(has.start, need.start), min(has.stop, need.stop))
                if rank == destination or not common:
                    continue
                size = len(common) * self.workload.num_mini_batches * row_bytes
                messages.append(Message(rank, destination, common, size))
        if not messages:
            return
        what = f"{', '.join(keys)} to ranks {format_ranks(layout.ranks)}"
        self._add(Transfer(what, layout.ranks, keys, tuple(messages)), producer.name, call.name)

    def _plan_weights(self) -> None:
        """New weights go from where a model trains to every other rank that uses it, a same-node sender first."""
        for call in self.workload.workflow.placed_calls:
            if call.kind != "train":
                continue
            home = self.placement.layouts[call.name]
            users = [c for c in self.workload.workflow.placed_calls if c.model == call.model]
            shadows = sorted({r for c in users for r in self.placement.layouts[c.name].ranks} - set(home.ranks))
            load = dict.fromkeys(home.ranks, 0)
            messages = []
            for rank in shadows:
                node = self.cluster.node_of(rank)
                sender = min(home.ranks, key=lambda r: (self.cluster.node_of(r) != node, load[r], r))  # noqa: B023
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
            for layout in layouts_of(call, self.workload, self.placement):
                self._emit(layout.ranks, Run(call.name, self._group(call, layout)))
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
        """The group whose collectives a Run enters; None if it computes alone."""
        train = self.workload.workflow.train_call(call.model) if call.model else None
        home = self.placement.layouts[train.name] if train else layout
        collective = (
            call.kind == "train"
            or (call.kind in ("generate", "infer") and home.zero == 3)
            or (call.kind == "compute" and self.workload.whiten == "batch")
        )
        if not collective or len(layout.ranks) == 1:
            return None
        self.groups.setdefault(layout.group, layout.ranks)
        return layout.group
