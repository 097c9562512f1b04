"""The search space of a call: the meshes of a cluster, and the layouts on each.

A mesh is a power-of-two slice of a node aligned to its size, an aligned power of two of whole nodes (ReaL, arXiv
2406.14088), or a prefix or suffix of all devices of a type in eighths, which allows separations such as 1/4 and 3/4.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.workflow import Generate, Infer, ModelCall, Train
from rlhf_spmd.plan.workload import Workload

EIGHTHS = 8  # prefixes and suffixes are multiples of an eighth
LEAST_PP = 8  # the most stages of a pipeline, or the number of nodes if that is larger (ReaL's pruning)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks of one device type that a call may run on.

    first: place of the first rank among all ranks sorted by device type, where every mesh is contiguous. kind: device
    type and numbers of ranks per node; equal for meshes on which everything takes equally long.
    """

    ranks: tuple[int, ...]
    first: int
    kind: tuple[str, tuple[int, ...]]

    @property
    def size(self) -> int:
        return len(self.ranks)


def meshes(cluster: Cluster) -> tuple[Mesh, ...]:
    """Returns all meshes of a cluster, large ones first. A mesh never has devices of two types."""
    by_span: dict[tuple[int, int], Mesh] = {}
    start = 0
    for device in cluster.device_types:
        ranks = cluster.ranks_of(device)
        for first, stop in _runs(cluster, ranks):
            mine = ranks[first:stop]
            nodes = [cluster.node_of(rank) for rank in mine]
            counts = tuple(nodes.count(node) for node in dict.fromkeys(nodes))
            by_span.setdefault((start + first, stop - first), Mesh(mine, start + first, (device, counts)))
        start += len(ranks)
    return tuple(sorted(by_span.values(), key=lambda mesh: (-mesh.size, mesh.first)))


def _runs(cluster: Cluster, ranks: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yields (first, stop) of the meshes among the ranks of one device type."""
    nodes = [cluster.node_of(rank) for rank in ranks]
    edges = [0, *(at for at in range(1, len(ranks)) if nodes[at] != nodes[at - 1]), len(ranks)]  # of nodes
    for first, stop in pairwise(edges):
        size = 1
        while size <= stop - first:
            yield from ((at, at + size) for at in range(first, stop - size + 1, size))
            size *= 2
    num_nodes, size = len(edges) - 1, 1
    while size <= num_nodes:
        yield from ((edges[at], edges[at + size]) for at in range(0, num_nodes - size + 1, size))
        size *= 2
    for eighth in range(1, EIGHTHS + 1):
        if len(ranks) * eighth % EIGHTHS == 0:
            yield 0, len(ranks) * eighth // EIGHTHS
            yield len(ranks) - len(ranks) * eighth // EIGHTHS, len(ranks)


def layouts(call: ModelCall, mesh: Mesh, workload: Workload, cluster: Cluster) -> Iterator[Layout]:
    """Yields the layouts of a call with weights on a mesh, valid for compile_program.

    Slices stay inside a node, and each has a key-value head; stages divide the layers or are a power of two; every
    shard has rows. Only train calls choose a ZeRO stage and recomputation; only frozen models without adapters are
    offloaded or, with stage 3, spread over dp.
    """
    has_adapters = workload.shape(call.model).adapters is not None
    may_leave = workload.workflow.train_call(call.model) is None and not has_adapters
    for pp, tp in _grids(call, mesh, workload, cluster):
        dp = mesh.size // (pp * tp)
        if isinstance(call, Generate) and call.has_turns and dp != mesh.size:
            continue  # an environment answers to one rank
        grid = Layout(mesh.ranks, dp=dp, pp=pp, tp=tp)
        rows = -(-workload.mini_batch // dp)
        if isinstance(call, Train):
            most_zero = 0 if dp == 1 else 1 if pp > 1 or has_adapters else 3
            for zero in range(most_zero + 1):
                for most in _micro_batches(rows, 2 * workload.micro_batch):
                    for recompute in (False, True):
                        yield replace(grid, zero=zero, micro_batch=most, recompute=recompute)
            continue
        sizes: Sequence[int | None] = (None,)
        if isinstance(call, Infer):
            least = min(rows, workload.micro_batch)
            sizes = _micro_batches(rows, workload.micro_batch) if pp > 1 else (least,)
        for micro_batch in sizes:
            yield replace(grid, micro_batch=micro_batch)
            if may_leave:
                yield replace(grid, micro_batch=micro_batch, offload=True)
                if dp > 1 and pp == 1:
                    yield replace(grid, micro_batch=micro_batch, zero=3)


def _grids(call: ModelCall, mesh: Mesh, workload: Workload, cluster: Cluster) -> Iterator[tuple[int, int]]:
    """Yields the (pp, tp) that fit a model, a mesh and the rows of a mini-batch."""
    shape = workload.shape(call.model)
    nodes = [cluster.node_of(rank) for rank in mesh.ranks]
    num_nodes = len(set(nodes))
    tp = 1
    while tp <= min(mesh.size, shape.num_kv_heads):
        together = all(nodes[at] == nodes[at + tp - 1] for at in range(0, mesh.size - tp + 1, tp))
        if together and mesh.size % tp == 0:
            for pp in range(1, min(mesh.size // tp, shape.num_layers, max(num_nodes, LEAST_PP)) + 1):
                even = shape.num_layers % pp == 0 or pp & (pp - 1) == 0
                if even and mesh.size // tp % pp == 0 and mesh.size // (tp * pp) <= workload.mini_batch:
                    yield pp, tp
        tp *= 2


def _micro_batches(rows: int, most: int) -> list[int]:
    """Returns powers of two up to the rows of a shard and up to `most`."""
    return [1 << power for power in range(max(1, min(rows, most)).bit_length())]
