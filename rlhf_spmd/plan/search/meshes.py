"""The search space of a call: the meshes of a cluster, and the layouts on each.

A mesh is a slice of a node or a run of whole nodes, of a size that is a power of two or divides the whole, and aligned
to it (ReaL, arXiv 2406.14088), or a prefix or suffix of all devices of a type, or of its nodes, in eighths rounded
down, which allows separations such as 1/4 and 3/4.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rlhf_spmd.plan.calls import Infer, ModelCall, Train
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout
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
        for size in _sizes(stop - first):
            yield from ((at, at + size) for at in range(first, stop - size + 1, size))
    num_nodes = len(edges) - 1
    for size in _sizes(num_nodes):
        yield from ((edges[at], edges[at + size]) for at in range(0, num_nodes - size + 1, size))
    for eighth in range(1, EIGHTHS):
        for edge in {len(ranks) * eighth // EIGHTHS, edges[num_nodes * eighth // EIGHTHS]} - {0}:
            yield 0, edge
            yield edge, len(ranks)


def _sizes(number: int) -> list[int]:
    """Returns the sizes of slices of so many: powers of two, and what divides the number."""
    return [size for size in range(1, number + 1) if number % size == 0 or size & (size - 1) == 0]


def layouts(call: ModelCall, mesh: Mesh, workload: Workload, cluster: Cluster) -> Iterator[Layout]:
    """Yields the layouts of a call with weights on a mesh, valid for compile_program.

    Slices stay inside a node, and each has a key-value head; every shard has rows. Inference without stages has at
    least the run's rows at a time, as fewer are never better. Only train calls choose a ZeRO stage and recomputation;
    only frozen models without adapters are offloaded or, with stage 3, spread over dp. Mixtures have stages 0 and 1.
    States of optimizers are only
    offloaded where there is recomputation.
    """
    shape = workload.shape(call.model)
    has_adapters, has_experts = shape.adapters is not None, shape.num_experts > 0
    may_leave = workload.workflow.train_call(call.model) is None and not has_adapters
    for pp, tp in _grids(call, mesh, workload, cluster):
        dp = mesh.size // (pp * tp)
        if pp > 1 and call.name in workload.counted:
            continue
        grid = Layout(mesh.ranks, dp=dp, pp=pp, tp=tp)
        rows = -(-workload.mini_batch // dp)
        if isinstance(call, Train):
            most_zero = 0 if dp == 1 else 1 if pp > 1 or has_adapters or has_experts else 3
            for zero in range(most_zero + 1):
                for most in _micro_batches(rows):
                    for recompute in (False, True):
                        yield replace(grid, zero=zero, micro_batch=most, recompute=recompute)
                    if zero < 3 and not has_adapters:
                        yield replace(grid, zero=zero, micro_batch=most, recompute=True, offload=True)
            continue
        sizes: Sequence[int | None] = (None,)
        if isinstance(call, Infer):
            least = 1 if pp > 1 else min(rows, workload.micro_batch)
            sizes = [size for size in _micro_batches(rows) if size >= least]
        for micro_batch in sizes:
            yield replace(grid, micro_batch=micro_batch)
            if may_leave:
                yield replace(grid, micro_batch=micro_batch, offload=True)
                if dp > 1 and pp == 1 and not has_experts:
                    yield replace(grid, micro_batch=micro_batch, zero=3)


def _grids(call: ModelCall, mesh: Mesh, workload: Workload, cluster: Cluster) -> Iterator[tuple[int, int]]:
    """Yields the (pp, tp) that fit a model, a mesh and the rows of a mini-batch."""
    shape = workload.shape(call.model)
    nodes = [cluster.node_of(rank) for rank in mesh.ranks]
    most_pp = min(shape.num_layers, max(len(set(nodes)), LEAST_PP))
    for tp in _divisors(mesh.size, min(mesh.size, shape.num_kv_heads)):
        if shape.most_tp(tp) == tp and all(nodes[at] == nodes[at + tp - 1] for at in range(0, mesh.size, tp)):
            for pp in _divisors(mesh.size // tp, most_pp):
                if mesh.size // (tp * pp) <= workload.mini_batch:
                    yield pp, tp


def _divisors(number: int, most: int) -> list[int]:
    return [one for one in range(1, min(number, most) + 1) if number % one == 0]


def _micro_batches(rows: int) -> list[int]:
    """Returns the divisors of the rows of a shard, and the sizes that cut these into 1, 2, 3, 4, 6, 8, 12, ...
    micro-batches.

    More passes are never faster but in a pipeline, and of the sizes with equally many the smallest needs the least
    memory; so only a size between two of these may be better, by the passes that it saves.
    """
    numbers = {times << power for power in range(rows.bit_length()) for times in (1, 3)}.union(_divisors(rows, rows))
    return sorted({-(-rows // number) for number in numbers if number <= rows})
