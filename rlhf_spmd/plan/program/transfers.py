"""What moves between layouts: rows to ranks that read and do not hold them, and new weights to shadow copies.

No row is sent to a rank that holds it. Everything that one call (or joint set of calls) makes and another one reads
travels in one move, with one message per run of columns between two ranks.

A receive of NCCL occupies a part of a GPU from the moment it is posted. So rows between GPUs go through host memory,
where a receive costs nothing until it is copied to the device. Large messages go by NCCL, but their receivers first
wait for a notice, through host memory, that the sender is ready.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from rlhf_spmd.plan.calls import Call, Train
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import HOST, Layout, format_ranks
from rlhf_spmd.plan.placement import Placement, ranks_of, uses_trained_weights
from rlhf_spmd.plan.program.instructions import BUCKET_BYTES, Message, Program, Transfer, keys_made, keys_read
from rlhf_spmd.plan.program.reallocate import plan_reallocation
from rlhf_spmd.plan.program.tensors import Holding
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.plan.workload import Workload

NOTICE_BYTES = 4  # a word that says nothing: its arrival is the message
ColumnSpan = tuple[int, int, int, int]  # source, destination, first column, last column + 1


@dataclass(frozen=True, slots=True)
class Move:
    """A transfer, the calls after which it starts, and the calls before which it must end."""

    transfer: Transfer
    producers: tuple[str, ...]
    consumers: tuple[str, ...]


def data_moves(workload: Workload, placement: Placement, cluster: Cluster) -> list[Move]:
    """Returns the moves of data keys for all mini-batches together, in the order in which they start."""
    workflow = workload.workflow
    held: dict[tuple[str, int], set[int]] = {}  # key, rank -> columns that it has so far
    spans: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[ColumnSpan, dict[str, None]]] = {}
    for call in workflow.calls:
        layouts = [placement.layouts[site] for site in placement.sites(call, workflow)]
        for key in call.inputs:
            producer = workflow.producer(key)
            if producer is None:
                continue  # given keys are on every rank
            owners = _owners(producer, workload, placement)
            units = placement.unit(producer.name), placement.unit(call.name)
            for layout in layouts:
                for rank in ranks_of(call, layout):
                    if key in keys_read(call, layout, rank):
                        columns = workload.columns_seen(call, layout.columns(rank, workload.mini_batch))
                        for span in _lacking(key, rank, columns, owners, held, cluster):
                            spans.setdefault(units, {}).setdefault(span, {})[key] = None
        for layout in layouts:  # ranks keep what they make
            for rank in ranks_of(call, layout):
                for key in keys_made(call, layout, rank):
                    held.setdefault((key, rank), set()).update(layout.columns(rank, workload.mini_batch))
    moves = [Move(_transfer(keys, workload), *units) for units, keys in spans.items()]
    position = {call.name: index for index, call in enumerate(workflow.calls)}
    return sorted(moves, key=lambda move: max(position[name] for name in move.producers))


def _owners(producer: Call, workload: Workload, placement: Placement) -> dict[int, tuple[int, ...]]:
    """Returns the ranks that make each column, one for each tensor-parallel slice."""
    source = placement.layouts[placement.sites(producer, workload.workflow)[0]]
    owners: dict[int, tuple[int, ...]] = {}
    for rank in source.last_stage:
        for column in source.columns(rank, workload.mini_batch):
            owners[column] = (*owners.get(column, ()), rank)
    return owners


def _lacking(
    key: str,
    rank: int,
    columns: range,
    owners: dict[int, tuple[int, ...]],
    held: dict[tuple[str, int], set[int]],
    cluster: Cluster,
) -> Iterator[ColumnSpan]:
    """Runs of the columns of a key that a rank lacks; from now on they count as held."""
    here = held.setdefault((key, rank), set())
    lacking = [c for c in columns if c not in here]
    here.update(lacking)
    source = {c: _nearest(owners[c], rank, cluster) for c in lacking}
    for _, run in groupby(enumerate(lacking), key=lambda pair: (pair[1] - pair[0], source[pair[1]])):
        (_, first), *rest = run
        yield source[first], rank, first, first + len(rest) + 1


def _nearest(owners: tuple[int, ...], rank: int, cluster: Cluster) -> int:
    """Returns which of several ranks with the same rows sends them to `rank`: one on its node if possible, in turn."""
    if len(owners) == 1:
        return owners[0]
    node = cluster.node_of(rank)
    near = [owner for owner in owners if cluster.node_of(owner) == node] or owners
    return near[rank % len(near)]


def _transfer(spans: dict[ColumnSpan, dict[str, None]], workload: Workload) -> Transfer:
    messages = []
    for (source, destination, first, end), keys in spans.items():
        size = (end - first) * workload.num_mini_batches * sum(workload.row_bytes(key) for key in keys)
        messages.append(Message(source, destination, tuple(keys), range(first, end), size))
    keys = dict.fromkeys(key for message in messages for key in message.keys)
    there = format_ranks(tuple(sorted({message.destination for message in messages})))
    return Transfer(f"{', '.join(keys)} to ranks {there}", tuple(messages))


def of_mini_batch(transfer: Transfer, mini_batch: int, num_mini_batches: int) -> Transfer:
    """Returns the part of a transfer that belongs to one mini-batch."""
    messages = tuple(replace(m, num_bytes=m.num_bytes // num_mini_batches) for m in transfer.messages)
    return replace(transfer, messages=messages, mini_batch=mini_batch)


def has_gpus(cluster: Cluster) -> bool:
    """Returns whether messages between devices go by NCCL; else all go through host memory, in one communicator."""
    return cluster.device_types != ("cpu",)


def routed(transfer: Transfer, workload: Workload, cluster: Cluster) -> Transfer:
    """Routes a transfer of rows through host memory if it goes between GPUs and no message is too large for that."""
    if not has_gpus(cluster) or any(message.num_bytes > workload.host_bytes for message in transfer.messages):
        return transfer
    return replace(transfer, messages=tuple(replace(message, through_host=True) for message in transfer.messages))


def notice_of(transfer: Transfer, cluster: Cluster) -> Transfer | None:
    """Returns the notice that a transfer of rows by NCCL is about to start. None: it needs none, or some rank sends and
    receives, so that it has begun to send before it could be told."""
    sources, destinations = ({getattr(m, end) for m in transfer.messages} for end in ("source", "destination"))
    if not has_gpus(cluster) or transfer.communicator == HOST or sources & destinations:
        return None
    pairs = sorted({(message.source, message.destination) for message in transfer.messages})
    messages = tuple(Message(*pair, (), range(0), NOTICE_BYTES, through_host=True) for pair in pairs)
    return replace(transfer, what=f"notice of {transfer.what}", messages=messages)


def weight_moves(workload: Workload, placement: Placement, cluster: Cluster) -> list[Move]:
    """Returns the moves of new weights, from the ranks that train a model to every copy of another shard or on another
    rank."""
    moves = []
    for call in workload.workflow.placed_calls:
        if not isinstance(call, Train):
            continue
        training = placement.layouts[call.name]
        copies: set[tuple[int, Shard]] = set()
        for user in workload.workflow.placed_calls:
            layout = placement.layouts[user.name]
            if user.model == call.model:
                away = (rank for rank in layout.ranks if not uses_trained_weights(user, rank, workload, placement))
                copies.update((rank, layout.shard(rank)) for rank in away)
        if not copies:
            continue
        targets = sorted(copies, key=lambda target: (target[0], str(target[1])))
        plan = plan_reallocation(
            workload.shape(call.model),
            {rank: holding(training, rank) for rank in training.ranks},
            targets,
            bytes_per_number=workload.trained_number_bytes(call.model),
            node_of=cluster.node_of,
        )
        kind = "weights" if workload.shape(call.model).adapters is None else "adapters"
        what = f"{kind} of {call.model} to ranks {format_ranks(tuple(sorted({rank for rank, _ in targets})))}"
        counts = plan.hop_messages(BUCKET_BYTES)
        messages = tuple(Message(*hop, (), range(0), size, counts[hop]) for hop, size in plan.hop_bytes().items())
        moves.append(Move(Transfer(what, messages, model=call.model, reallocation=plan), (call.name,), ()))
    return moves


def holding(training: Layout, rank: int) -> Holding:
    """Returns the part of a model on a training rank between steps: its shard, or under ZeRO 3 a part of it."""
    if training.zero < 3:
        return Holding(training.shard(rank))
    replicas = sorted(training.data_ranks(rank))
    return Holding(training.shard(rank), replicas.index(rank), len(replicas))


def communicators(
    programs: Iterable[Program],
) -> tuple[dict[str, tuple[int, ...]], dict[str | None, list[tuple[int, int]]]]:
    """Returns the groups and pairs of several programs of one job."""
    groups: dict[str, tuple[int, ...]] = {}
    pairs: dict[str | None, dict[tuple[int, int], None]] = {}
    for program in programs:
        groups |= program.groups
        for name, some in program.pairs.items():
            pairs.setdefault(name, {}).update(dict.fromkeys(some))
    return groups, {name: list(some) for name, some in pairs.items()}
