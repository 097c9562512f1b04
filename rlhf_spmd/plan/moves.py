"""What has to move between layouts: rows that a call reads where they are not, and new weights to shadow copies.

Rows that are held somewhere are never sent there again; what one call (or a joint set of calls) makes and another one
reads travels in one move; between two ranks there is one message per run of columns.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout, format_ranks
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program import Message, Transfer
from rlhf_spmd.plan.workflow import Call
from rlhf_spmd.plan.workload import Workload

Run = tuple[int, int, int, int]  # source, destination, first column, last column + 1


@dataclass(frozen=True, slots=True)
class Move:
    """A transfer, the calls after which it starts, and the calls before which it must have ended."""

    transfer: Transfer
    producers: tuple[str, ...]
    consumers: tuple[str, ...]


def data_moves(workload: Workload, placement: Placement) -> list[Move]:
    """The moves of data keys in the order in which they start; of all mini-batches together."""
    workflow = workload.workflow
    held: dict[tuple[str, int], set[int]] = {}  # key, rank -> columns there by now
    parts: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[Run, list[str]]] = {}
    for call in workflow.calls:
        layouts = [placement.layouts[site] for site in placement.sites(call, workflow)]
        for key in call.inputs:
            producer = workflow.producer(key)
            if producer is None:
                continue  # given keys are on every rank
            owner = _owners(producer, workload, placement)
            units = placement.unit(producer.name), placement.unit(call.name)
            for layout in layouts:
                for run in _lacking(key, layout, workload.mini_batch, owner, held):
                    keys = parts.setdefault(units, {}).setdefault(run, [])
                    keys += [key] if key not in keys else []
        for layout in layouts:  # what is made stays where it is made
            for rank in layout.ranks:
                for key in call.outputs:
                    held.setdefault((key, rank), set()).update(layout.columns(rank, workload.mini_batch))
    moves = [Move(_transfer(runs, workload), *units) for units, runs in parts.items()]
    position = {call.name: index for index, call in enumerate(workflow.calls)}
    return sorted(moves, key=lambda move: max(position[name] for name in move.producers))


def _owners(producer: Call, workload: Workload, placement: Placement) -> dict[int, int]:
    """Column -> rank that makes it."""
    source = placement.layouts[placement.sites(producer, workload.workflow)[0]]
    return {c: rank for rank in source.ranks for c in source.columns(rank, workload.mini_batch)}


def _lacking(key: str, layout: Layout, mini_batch: int, owner: dict[int, int], held: dict) -> Iterator[Run]:
    """Runs of columns of a key that the ranks of a layout lack; from now on they count as held."""
    for rank in layout.ranks:
        here = held.setdefault((key, rank), set())
        columns = [c for c in layout.columns(rank, mini_batch) if c not in here]
        here.update(columns)
        start = 0
        for stop in range(1, len(columns) + 1):
            first, last = columns[start], columns[stop - 1]
            if stop < len(columns) and columns[stop] == last + 1 and owner[columns[stop]] == owner[first]:
                continue
            yield owner[first], rank, first, last + 1
            start = stop


def _transfer(runs: dict[Run, list[str]], workload: Workload) -> Transfer:
    messages = []
    for (source, destination, first, end), keys in runs.items():
        size = (end - first) * workload.num_mini_batches * sum(workload.row_bytes(key) for key in keys)
        messages.append(Message(source, destination, tuple(keys), range(first, end), size))
    keys = dict.fromkeys(key for message in messages for key in message.keys)
    there = format_ranks(tuple(sorted({message.destination for message in messages})))
    return Transfer(f"{', '.join(keys)} to ranks {there}", tuple(messages))


def of_mini_batch(transfer: Transfer, mini_batch: int, num_mini_batches: int) -> Transfer:
    """The part of a transfer of all mini-batches that belongs to one of them."""
    messages = [
        Message(m.source, m.destination, m.keys, m.columns, m.num_bytes // num_mini_batches) for m in transfer.messages
    ]
    return Transfer(transfer.what, tuple(messages), mini_batch=mini_batch)


def weight_moves(workload: Workload, placement: Placement, cluster: Cluster) -> list[Move]:
    """New weights go from where a model trains to every other rank that uses it, a same-node sender first."""
    moves = []
    for call in workload.workflow.placed_calls:
        if call.kind != "train":
            continue
        home = placement.layouts[call.name].ranks
        users = [c.name for c in workload.workflow.placed_calls if c.model == call.model]
        shadows = sorted({rank for user in users for rank in placement.layouts[user].ranks} - set(home))
        pairs = list(_senders(home, shadows, cluster))
        size = workload.weight_bytes(call.model)
        messages = tuple(Message(sender, rank, (), range(0), size) for sender, rank in pairs)
        if messages:
            what = f"weights of {call.model} to ranks {format_ranks(tuple(shadows))}"
            moves.append(Move(Transfer(what, messages, model=call.model), (call.name,), ()))
    return moves


def _senders(home: Iterable[int], shadows: Iterable[int], cluster: Cluster) -> Iterator[tuple[int, int]]:
    """(sender, receiver) with the sends spread evenly, on the receiver's own node where the model trains there."""
    load = dict.fromkeys(sorted(home), 0)
    nodes = {rank: cluster.node_of(rank) for rank in (*load, *shadows)}
    near = {nodes[rank] for rank in load}
    for rank in sorted(shadows, key=lambda r: nodes[r] not in near):  # who has a choice comes last
        sender = min(load, key=lambda r: (nodes[r] != nodes[rank], load[r], r))
        load[sender] += 1
        yield sender, rank
