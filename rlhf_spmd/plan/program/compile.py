"""Workload + placement -> program. Pure, deterministic, the same on every rank.

Instructions are emitted in one global order, each to the ranks that take part: the calls before training in the order
of the algorithm (while streaming, once per mini-batch, with the first epoch of training on it), then training by epoch
and model. A transfer is posted right after the calls that make its data, and its Wait comes right before the first call
that reads them, so that it overlaps with everything between.

By NCCL a rank that only receives rows posts them when it has a notice of their senders, and waits for that notice where
it waits for the rows. Before that it posts, in the order of their senders, what else it knows to come. So all ranks
still post in the order of emission. Weights are posted where they are waited for; so are, by NCCL, rows sampled
for the next step, at the end of this one.

Calls that rounds repeat (rounds.py) come first, once for each round. A rank ends all messages of a round before the
next one; what other calls read of it moves after the last round.

In a chain of iterations (chain.py) new weights leave when their model has trained, and copies wait for them in the next
iteration. So the model that is used first trains first, and others that train on its ranks after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from rlhf_spmd.plan.calls import Call, Compute, Train, is_gate, trains
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import COLLECTIVES, HOST, STAGES, Layout, group_name
from rlhf_spmd.plan.placement import Placement, group_of, ranks_of
from rlhf_spmd.plan.program.ahead import with_delays, with_gates
from rlhf_spmd.plan.program.chain import (
    calls_before,
    in_order,
    order_of_training,
    place_delayed,
    ranks_of_state,
    return_early,
)
from rlhf_spmd.plan.program.instructions import (
    Agree,
    Instruction,
    Load,
    Offload,
    Post,
    Program,
    Run,
    Transfer,
    Wait,
    merged,
)
from rlhf_spmd.plan.program.rounds import agreeing, repeated, with_rounds
from rlhf_spmd.plan.program.transfers import (
    Move,
    data_moves,
    has_gpus,
    notice_of,
    of_mini_batch,
    routed,
    weight_moves,
)
from rlhf_spmd.plan.validate import validate
from rlhf_spmd.plan.workload import Workload


def compile_program(workload: Workload, placement: Placement, cluster: Cluster) -> Program:
    """Compiles one iteration, with the parity gates of a run that samples ahead. Raises UserError if the placement does
    not fit the workload or the cluster."""
    workload, placement = with_rounds(*with_gates(workload, placement))
    validate(placement, workload, cluster)
    workload = in_order(workload, placement)
    compiler = _Compiler(workload, placement, cluster)
    compiler.emit()
    lists = tuple(tuple(instructions) for instructions in compiler.instructions)
    return with_delays(Program(workload, placement, cluster, compiler.groups, tuple(compiler.transfers), lists))


@dataclass(slots=True)
class _Compiler:
    workload: Workload
    placement: Placement
    cluster: Cluster
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    instructions: list[list[Instruction]] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    inside: frozenset[str] = frozenset()  # calls that rounds repeat
    copies: dict[tuple[int, int], int] = field(default_factory=dict)  # move, round -> transfer
    given: set[tuple[int, Post | Wait]] = field(default_factory=set)  # rank, instruction
    notices: dict[int, int] = field(default_factory=dict)  # transfer -> that of its notice
    due: dict[int, list[int]] = field(default_factory=dict)  # rank -> transfers to post once it has their notices
    early: bool = False  # whether new weights leave when their model has trained
    # transfers of weights that copies wait for in the next iteration -> what trains them, in the order of leaving
    delayed: dict[int, Train] = field(default_factory=dict)

    def emit(self) -> None:
        """Writes the instruction lists."""
        self.instructions = [[] for _ in self.cluster.ranks]
        self._inner_groups()
        self.moves = data_moves(self.workload, self.placement, self.cluster)
        num = self.workload.num_mini_batches
        streams = self.placement.streams(self.workload)
        pieces: Sequence[int | None] = range(num) if streams else (None,)
        for piece in pieces:
            parts = (
                move.transfer if piece is None else of_mini_batch(move.transfer, piece, num) for move in self.moves
            )
            self.transfers += (routed(part, self.workload, self.cluster) for part in parts)
        self.inside = repeated(self.workload.workflow)
        for number, (index, move) in product(range(1, self.workload.rounds), enumerate(self.moves)):
            if self._stays(move):
                self.copies[index, number] = len(self.transfers)
                self.transfers.append(replace(self.transfers[index], round=number))
        first_weights = len(self.transfers)
        weights = weight_moves(self.workload, self.placement, self.cluster)
        self.transfers += [move.transfer for move in weights]
        self.early = return_early(weights, self.workload, self.placement)
        after_training = {move.producers[0]: first_weights + index for index, move in enumerate(weights)}
        for number, transfer in enumerate(self.transfers[:first_weights]):
            if self._is_last(number):
                continue
            if (notice := notice_of(transfer, self.cluster)) is not None:
                self.notices[number] = len(self.transfers)
                self.transfers.append(notice)
        if any(transfer.communicator == HOST for transfer in self.transfers):
            self._group(self.cluster.ranks, HOST)

        trains, later = order_of_training(self.workload, self.placement)
        for ahead in range(min(self.placement.in_flight, num) if streams else 0):
            self._receive_early(ahead)
        units = self._units()
        self._emit_rounds([unit for unit in units if unit[0].name in self.inside])
        for piece in pieces:
            for unit in units:
                if unit[0].name not in self.inside:
                    self._emit_unit(unit, piece)
            for rank in self.due if self.placement.chains(self.workload) else ():
                self._post_due(rank)  # models train in another order than that of their rows, and weights leave early
            if piece == pieces[-1]:
                agrees = ranks_of_state(self.workload, self.placement)
                for rank in agrees:
                    self.instructions[rank].append(Agree("state", agrees))
            if piece is not None:
                for call in trains:
                    self._emit_train(call, 0, piece, after_training)
                if piece + self.placement.in_flight < num:
                    self._receive_early(piece + self.placement.in_flight)
        for epoch in range(1 if streams else 0, self.workload.epochs):
            for call in trains:  # model by model: the first one's weights travel while the second one trains
                for mini_batch in range(num):
                    self._emit_train(call, epoch, mini_batch, after_training)
        for call in later:
            for epoch, mini_batch in product(range(self.workload.epochs), range(num)):
                self._emit_train(call, epoch, mini_batch, after_training)
        for number, transfer in enumerate(self.transfers):  # senders keep their buffers until here
            for rank in transfer.ranks:
                if number not in self.delayed:
                    self._post(rank, number)  # weights between GPUs; all else has been posted
                    self._once(rank, Wait(number))
        self._emit_offloads()
        if self.placement.chains(self.workload):
            self._emit_delayed()
        else:
            for instructions in self.instructions:
                instructions.append(Agree("metrics"))

    def _units(self) -> list[tuple[Call, ...]]:
        """Returns the calls before training; those that exchange together form one unit."""
        workflow = self.workload.workflow
        calls = [call for call in workflow.calls if not isinstance(call, Train)]
        if self.placement.ahead:  # the batch that is drawn comes first
            calls.sort(key=lambda call: trains(call, workflow))
        names = [self.placement.unit(call.name) for call in calls]
        return [tuple(workflow.call(name) for name in unit) for unit in dict.fromkeys(names)]

    def _once(self, rank: int, instruction: Post | Wait) -> None:
        """Adds an instruction unless the rank has it."""
        if (rank, instruction) not in self.given:
            self.given.add((rank, instruction))
            self.instructions[rank].append(instruction)

    def _post(self, rank: int, number: int) -> None:
        """Posts a transfer; by NCCL after the transfers due before it."""
        if self.transfers[number].communicator != HOST:
            self._post_due(rank)
        self._once(rank, Post(number))

    def _post_due(self, rank: int, last: int | None = None) -> None:
        """Posts the transfers due on a rank, up to one (None: all), when its notices are there."""
        due = self.due.get(rank, [])
        end = len(due) if last is None else due.index(last) + 1 if last in due else 0
        for number in due[:end]:
            self._once(rank, Wait(self.notices[number]))
            self._once(rank, Post(number))
        del due[:end]

    def _wait(self, rank: int, number: int) -> None:
        """Waits for a transfer of rows."""
        self._post_due(rank, number)
        self._once(rank, Wait(number))

    def _number(self, index: int, piece: int | None, of_round: int = 0) -> int:
        """Returns the transfer of a move; the moves of one mini-batch are neighbours."""
        return self.copies[index, of_round] if of_round else index + (piece or 0) * len(self.moves)

    def _stays(self, move: Move) -> bool:
        """Returns whether a move is between calls of rounds."""
        return self.inside.issuperset((*move.producers, *move.consumers))

    def _emit_rounds(self, units: list[tuple[Call, ...]]) -> None:
        """Emits the calls of each round and, after the last one, what other calls read of it. A rank has ended all that
        it sends in a round, from its rows themselves, before they change."""
        ranks = agreeing(self.workload, self.placement, self.cluster)
        stay = [index for index, move in enumerate(self.moves) if self._stays(move)]
        for number in range(self.workload.rounds if units else 0):
            for rank in ranks if number else ():
                self.instructions[rank].append(Agree(f"round {number + 1}", ranks, round=number))
            for unit in units:
                self._emit_unit(unit, None, number)
            for moved in (self._number(index, None, number) for index in stay):
                for rank in self.transfers[moved].ranks:
                    self._wait(rank, moved)
        for index, move in enumerate(self.moves):
            if self.inside.issuperset(move.producers) and index not in stay:
                self._emit_posts(index, None)

    def _arriving(self, consumers: tuple[str, ...]) -> dict[int, list[int]]:
        """Returns the moves that each rank waits for before some calls, by index."""
        arriving: dict[int, list[int]] = {}
        for index, move in enumerate(self.moves):
            if move.consumers == consumers and not self._waits_for_next_step(move):
                for rank in {message.destination for message in move.transfer.messages}:
                    arriving.setdefault(rank, []).append(index)
        return arriving

    def _waits_for_next_step(self, move: Move) -> bool:
        """Returns whether rows are sampled in this step and trained on in the next one, before which all Waits end."""
        workflow = self.workload.workflow
        made_by, read_by = (workflow.call(names[0]) for names in (move.producers, move.consumers))
        return self.placement.ahead > 0 and trains(read_by, workflow) and not trains(made_by, workflow)

    def _is_last(self, number: int) -> bool:
        """Returns whether rows move at the end of the step. By NCCL they would have to wait there for ranks that train,
        and before all that their sender sends after them, so that sampling would wait for training."""
        move = self.moves[number % len(self.moves)]
        by_nccl = has_gpus(self.cluster) and self.transfers[number].communicator != HOST
        return by_nccl and not self.transfers[number].round and self._waits_for_next_step(move)

    def _emit_unit(self, unit: tuple[Call, ...], piece: int | None, number: int = 0) -> None:
        """Waits, Runs and Posts of calls that exchange together, in a round."""
        names = tuple(call.name for call in unit)
        arriving = self._arriving(names)
        for call in unit:
            for site in self.placement.sites(call, self.workload.workflow):
                self._emit_call(call, site, piece, arriving, number)
        for index, move in enumerate(self.moves):
            if move.producers == names and (names[0] not in self.inside or self._stays(move)):
                self._emit_posts(index, piece, number)

    def _emit_call(self, call: Call, site: str, piece: int | None, arriving: dict[int, list[int]], number: int) -> None:
        layout = self.placement.layouts[site]
        consumer = site if isinstance(call, Compute) else None
        if is_gate(call):
            piece = 0
        for rank in ranks_of(call, layout):
            group = self._group(group_of(call, layout, self.workload, self.placement, rank))
            late = arriving.get(rank, [])
            own, others = self._split(call, layout, rank, late, group)
            run = Run(call.name, group, piece, consumer=consumer, round=number)
            runs = [replace(run, columns=columns) for columns in (*own, *others)]
            self.instructions[rank] += runs[: len(own)]
            for index in late:
                self._wait(rank, self._number(index, piece, number))
            self.instructions[rank] += runs[len(own) :]

    def _split(
        self, call: Call, layout: Layout, rank: int, late: list[int], group: str | None
    ) -> tuple[Sequence[range | None], Sequence[range | None]]:
        """Splits the columns into those to compute before and after the late moves arrive; None means all of them."""
        if call.name not in self.placement.own_first or group is not None:
            return [], [None]
        messages = [message for index in late for message in self.moves[index].transfer.messages]
        coming = {c for m in messages if m.destination == rank and set(m.keys) & set(call.inputs) for c in m.columns}
        columns = layout.columns(rank, self.workload.mini_batch)
        own = [c for c in columns if c not in coming]
        if not own or len(own) == len(columns):
            return [], [None]
        return merged(range(c, c + 1) for c in own), merged(range(c, c + 1) for c in columns if c in coming)

    def _emit_posts(self, index: int, piece: int | None, of_round: int = 0) -> None:
        """Starts a move; while streaming, only after the one of in_flight mini-batches earlier is done."""
        number = self._number(index, piece, of_round)
        if self._is_last(number):
            return
        notice = self.notices.get(number)
        sources = {message.source for message in self.transfers[number].messages}
        for rank in self.transfers[number].ranks:
            if rank in sources and piece is not None and piece >= self.placement.in_flight:
                self._wait(rank, self._number(index, piece - self.placement.in_flight))
            if notice is not None:
                self._post(rank, notice)
            if notice is None or rank in sources:
                self._post(rank, number)
            else:
                self.due.setdefault(rank, []).append(number)

    def _receive_early(self, piece: int) -> None:
        """Posts a mini-batch's moves, or notices of them, on ranks that only receive, before the data exist; by NCCL no
        others."""
        sending = {message.source for move in self.moves for message in move.transfer.messages}
        for index, move in enumerate(self.moves):
            for rank in move.transfer.ranks:
                number = self._number(index, piece)
                number = self.notices.get(number, number)
                by_nccl = has_gpus(self.cluster) and self.transfers[number].communicator != HOST
                if rank not in sending and not by_nccl:
                    self._post(rank, number)

    def _emit_train(self, call: Train, epoch: int, mini_batch: int, after_training: dict[str, int]) -> None:
        """Emits one optimizer step. After a model's last one, its weights are sent, unless by NCCL: then they are sent
        at the end, because a receive would occupy a part of a GPU that trains the next model. In a chain, where no such
        rank trains another model, they are sent at once, and the ranks that only receive wait in the next iteration."""
        layout = self.placement.layouts[call.name]
        piece = mini_batch if self.placement.streams(self.workload) else None
        for rank, moves in self._arriving((call.name,)).items():
            for index in moves:
                self._wait(rank, self._number(index, piece))
        group = self._group(group_of(call, layout, self.workload, self.placement, layout.ranks[0]))
        run = Run(call.name, group, mini_batch, epoch)
        for rank in layout.ranks:
            self.instructions[rank].append(run)
        last = (epoch, mini_batch) == (self.workload.epochs - 1, self.workload.num_mini_batches - 1)
        if not last or call.name not in after_training:
            return
        number = after_training[call.name]
        if self.early:
            self.delayed[number] = call
            for rank in layout.ranks:
                if rank in self.transfers[number].ranks:
                    self._post(rank, number)
                    self._once(rank, Wait(number))
        elif not has_gpus(self.cluster):
            for rank in self.transfers[number].ranks:
                self._once(rank, Post(number))

    def _group(self, ranks: tuple[int, ...] | None, purpose: str = COLLECTIVES) -> str | None:
        """Returns the name of a group, which is made if it is new; None for a rank alone."""
        if ranks is None or len(ranks) == 1:
            return None
        name = group_name(ranks, purpose)
        self.groups.setdefault(name, tuple(sorted(ranks)))
        return name

    def _inner_groups(self) -> None:
        """Makes the groups inside the layouts: slices of a stage, a copy of the model, the ranks of one shard if they
        sum gradients or gather weights, those of them that sum on and between nodes, and stages of a slice."""
        for call in self.workload.workflow.placed_calls:
            layout = self.placement.layouts[call.name]
            for rank in layout.ranks if self.workload.models[call.model] is not None else ():
                self._group(layout.tensor_ranks(rank))
                self._group(layout.model_ranks(rank))
                if isinstance(call, Train) or layout.zero == 3:
                    self._group(layout.data_ranks(rank))
                    self._group(layout.tied_ranks(rank))
                self._group(layout.stage_ranks(rank), STAGES)
            for rank in layout.model_ranks(layout.ranks[0]) if isinstance(call, Train) else ():
                rows = layout.sum_grid(rank, self.cluster.node_of)
                for ranks in (*rows, *zip(*rows, strict=True)):
                    self._group(ranks)

    def _emit_delayed(self) -> None:
        """Emits what the ranks that only receive new weights wait for in the next iteration."""
        by_host = all(move.communicator == HOST for move in self.transfers if move.model is None)
        given = self._units(), self.moves, self.workload, self.placement
        calls = {number: calls_before(call, *given, by_host=by_host) for number, call in self.delayed.items()}
        delayed = [(number, self.transfers[number], before) for number, before in calls.items()]
        for rank, instructions in enumerate(self.instructions):
            place_delayed(instructions, rank, delayed, by_host=by_host)

    def _emit_offloads(self) -> None:
        """Emits Offloads of weights after a rank's last Run with them; and Loads before the Run before its first one,
        beside which they are loaded, unless another model is there then."""
        for rank, instructions in enumerate(self.instructions):
            for model, calls in offloaded(self.workload, self.placement, rank).items():
                places = [
                    i
                    for i, instruction in enumerate(instructions)
                    if isinstance(instruction, Run) and instruction.call in calls
                ]
                if not places:
                    continue
                instructions.insert(places[-1] + 1, Offload(model))
                first = places[0]
                early = next((i for i in reversed(range(first)) if isinstance(instructions[i], Run)), first)
                kinds = [type(one) for one in instructions[:first] if isinstance(one, Load | Offload)]
                is_alone = kinds.count(Load) == kinds.count(Offload)
                is_alone = is_alone and not any(isinstance(one, Offload) for one in instructions[early:first])
                instructions.insert(early if is_alone else first, Load(model))


def offloaded(workload: Workload, placement: Placement, rank: int) -> dict[str, tuple[str, ...]]:
    """Returns the frozen models that a rank keeps in host memory between calls, and the calls that use them."""
    users: dict[str, tuple[str, ...]] = {}
    for call in workload.workflow.placed_calls:
        layout = placement.layouts[call.name]
        if layout.offload and rank in layout.ranks and not isinstance(call, Train):
            users[call.model] = (*users.get(call.model, ()), call.name)
    return users
