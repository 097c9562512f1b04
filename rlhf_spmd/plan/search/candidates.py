"""A call in a layout, in a few numbers: seconds by closed forms from seconds.py, bytes by the formulas of memory.py."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from math import ceil, inf
from operator import le
from typing import TypeVar

from rlhf_spmd.plan.calls import Generate, ModelCall, Train
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.answers import generate_s
from rlhf_spmd.plan.cost.memory import (
    activation_bytes,
    base_sizes,
    cache_bytes,
    copied_bytes,
    gathered_bytes,
    num_frozen,
    num_params,
    num_trained,
    reduce_numel,
    sequence_bytes,
    zero_bytes,
)
from rlhf_spmd.plan.cost.seconds import Cost
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import DECODE_MINI_BATCHES, leaves_device
from rlhf_spmd.plan.program.ahead import gates
from rlhf_spmd.plan.program.pipeline import pass_bytes
from rlhf_spmd.plan.program.rounds import repeated
from rlhf_spmd.plan.search.meshes import Mesh, layouts, meshes
from rlhf_spmd.plan.shard import Shard

T = TypeVar("T")
LEAST_GAIN = 0.01  # of the seconds of a call, for which its micro-batches may be larger

# Whether the search may give a call a layout. It is asked once for all meshes of a kind, so it must not depend on which
# ranks these are.
Allowed = Callable[[ModelCall, Layout, Cluster], bool]


def anything(call: ModelCall, layout: Layout, cluster: Cluster) -> bool:
    """Returns the whole search space."""
    return True


Destination = tuple[int, int, int, int]  # of weights: first and last + 1 place of the mesh, stages, slices


@dataclass(slots=True, eq=False)
class Candidate:
    """A call in a layout. Bytes are those of the rank that needs the most of each kind, seconds those of one iteration.

    layout: on some mesh of the same kind.
    piece_s: seconds of one mini-batch while streaming.
    gather_s: seconds to gather the weights, if training spreads them by ZeRO 3.
    spread_bytes: what then is gathered at a time.
    whole_bytes: weights of one shard.
    static_bytes: of training, or of a copy of the weights.
    activation_bytes: of training; of inference on more rows at a time than the run's micro_batch, which memory.py
        leaves to the reserve, no less than it takes: those of training that recomputes.
    base_bytes: those of them that models have in common (Workload.bases); the others are the kinds of
        memory.working_bytes, copies with adapters among the cache_bytes.
    ranks, first, stop: of its mesh (meshes.Mesh).
    """

    layout: Layout
    mesh: Mesh
    seconds: float
    piece_s: float
    gather_s: float = 0.0
    whole_bytes: int = 0
    spread_bytes: int = 0
    static_bytes: int = 0
    base_bytes: int = 0
    gathered_bytes: int = 0
    gradient_bytes: int = 0
    activation_bytes: int = 0
    cache_bytes: int = 0
    ranks: tuple[int, ...] = field(init=False)
    first: int = field(init=False)
    stop: int = field(init=False)
    where: Destination = field(init=False)
    copy: tuple[int, int, int] = field(init=False)  # equal for copies with the same shards on the ranks of both

    def __post_init__(self) -> None:
        mesh, pp, tp = self.mesh, self.layout.pp, self.layout.tp
        self.ranks, self.first, self.stop = mesh.ranks, mesh.first, mesh.first + mesh.size
        self.where = self.first, self.stop, pp, tp
        self.copy = pp, tp, self.first % (pp * tp)

    def on(self, mesh: Mesh) -> "Candidate":
        """Returns the same on another mesh of its kind. (dataclasses.replace takes four times as long.)"""
        other = copy(self)
        other.mesh = mesh
        other.__post_init__()
        return other

    @property
    def placed(self) -> Layout:
        """The layout on its own ranks."""
        return replace(self.layout, ranks=self.ranks)

    @property
    def costs(self) -> tuple[float, ...]:
        """All costs; a candidate that is lower in one and higher in none is always better."""
        seconds = self.seconds, self.piece_s, self.gather_s
        in_calls = self.gathered_bytes, self.gradient_bytes, self.activation_bytes, self.cache_bytes
        return *seconds, self.static_bytes, *in_calls


class CallCosts:
    """Candidates of calls with their costs, computed once for all meshes of one kind. evaluated_tokens, ahead: as in
    planner.search."""

    def __init__(self, cost: Cost, allowed: Allowed = anything, evaluated_tokens: int = 0, ahead: int = 0):
        self.cost, self.workload, self.allowed = cost, cost.workload, allowed
        self.gates = gates(cost.workload.workflow) if ahead else {}  # that follow generations on their ranks
        self.evaluation = replace(cost.workload, max_response=evaluated_tokens) if evaluated_tokens else None
        self.row_tokens = float(sum(self.workload.row_lengths))
        self.attended_tokens = cost.attended() * self.row_tokens
        self.known_s: dict[tuple[object, ...], float] = {}
        self.known_bytes: dict[tuple[object, ...], int] = {}
        self.updates_s: dict[tuple[object, ...], float] = {}

    def candidates(self, call: ModelCall) -> tuple[Candidate, ...]:
        """Returns the candidates of a call that no other one beats in all costs, quick ones first."""
        candidates: list[Candidate] = []
        of_kind: dict[tuple[str, tuple[int, ...]], list[Candidate]] = {}
        for mesh in meshes(self.cost.cluster):
            if mesh.kind not in of_kind:
                every = layouts(call, mesh, self.workload, self.cost.cluster)
                ways = [self.candidate(call, mesh, one) for one in every if self.allowed(call, one, self.cost.cluster)]
                of_kind[mesh.kind] = list(self._unbeaten(call, _worthwhile(ways)))
            candidates += [one.on(mesh) for one in of_kind[mesh.kind]]
        return tuple(sorted(candidates, key=lambda one: one.seconds))

    def _unbeaten(self, call: ModelCall, found: Iterable[Candidate]) -> Iterator[Candidate]:
        """Yields the unbeaten among candidates on one mesh; if other calls use the model or its base, only candidates
        with the same grid, ZeRO 3 and offloading compete."""
        calls, bases = self.workload.workflow.placed_calls, self.workload.bases
        same = [one for one in calls if bases.get(one.model, one.model) == bases.get(call.model, call.model)]
        alone = len(same) == 1
        groups: dict[tuple[int | bool, ...], list[Candidate]] = {}
        for one in found:
            layout = one.layout
            key = () if alone else (layout.pp, layout.tp, layout.zero == 3, layout.offload)
            groups.setdefault(key, []).append(one)
        for group in groups.values():
            yield from unbeaten((one.costs, one) for one in group)

    def candidate(self, call: ModelCall, mesh: Mesh, layout: Layout) -> Candidate:
        """Returns the candidate of a call in a layout on a mesh."""
        seconds = {"generate": self._generate_s, "infer": self._infer_s, "train": self._train_s}[call.kind]
        whole_s, piece_s = seconds(call, layout, mesh)
        cost, workload = self.cost, self.workload
        shape, c = workload.shape(call.model), workload.param_bytes
        shards = [Shard(stage, layout.pp, layout.tp - 1, layout.tp) for stage in _ends(layout)]  # the largest slices
        params = max(num_params(shape, shard) for shard in shards)
        gather_s = cost.spread_s(call, layout, layout.rank_at(0, 0, layout.tp - 1))
        moved = max(num_trained(shape, shard) for shard in shards)
        options = {"whole_bytes": workload.trained_number_bytes(call.model) * moved}
        trains, taken = isinstance(call, Train), self._taken(call, layout, shards)
        if call.model in workload.bases and not (leaves_device(layout) and not trains):
            options["base_bytes"] = c * max(sum(dict(base_sizes(shape, shard)).values()) for shard in shards)
        if trains:
            options |= {
                "static_bytes": taken["weights"]
                + taken["kept gradients"]
                + (0 if layout.offload else taken["optimizer"]),
                "gradient_bytes": taken["gradients"],
                "activation_bytes": self._activation_bytes(call, layout),
                "gathered_bytes": taken["gathered"],
            }
        else:
            options["static_bytes"] = 0 if layout.offload else taken["weights"]
            if layout.pp == 1:  # ZeRO 3 has no stages
                options["spread_bytes"] = gathered_bytes(workload, call, layout, layout.rank_at(0, 0, layout.tp - 1))
            if layout.offload or (layout.zero == 3 and layout.dp > 1):
                options["gathered_bytes"] = c * params if layout.offload else options["spread_bytes"]
            if (layout.micro_batch or 0) > workload.micro_batch:
                options["activation_bytes"] = self._activation_bytes(call, replace(layout, recompute=True))
        if isinstance(call, Generate):
            last = [layout.rank_at(layout.dp - 1, stage, layout.tp - 1) for stage in _ends(layout)]
            options["cache_bytes"] = max(cache_bytes(workload, call, layout, rank) for rank in last)
            if self.evaluation and call == workload.workflow.generate_calls[0]:  # the one that evaluates
                least = max(sequence_bytes(self.evaluation, call, layout, rank) for rank in last)
                options["cache_bytes"] = max(options["cache_bytes"], least)
            options["cache_bytes"] += max(copied_bytes(workload, call, layout, rank) for rank in last)
        return Candidate(layout, mesh, whole_s, piece_s, gather_s, **options)

    def _taken(self, call: ModelCall, layout: Layout, shards: Sequence[Shard]) -> dict[str, int]:
        """Returns memory.zero_bytes of the rank that needs the most; of a model with adapters also the weights of its
        base."""
        shape, c, trains = self.workload.shape(call.model), self.workload.param_bytes, isinstance(call, Train)
        moved = max(num_trained(shape, shard) for shard in shards)
        if shape.adapters is None:
            params = max(num_params(shape, shard) for shard in shards)
            numel = max(reduce_numel(self.workload, call.model, layout, one) for one in shards) if trains else 0
            return zero_bytes(layout, params, numel, c, trains=trains)
        taken = zero_bytes(layout, moved, 0, self.workload.trained_number_bytes(call.model), trains=trains)
        return taken | {"weights": taken["weights"] + c * max(num_frozen(shape, shard) for shard in shards)}

    def _activation_bytes(self, call: ModelCall, layout: Layout) -> int:
        key = call.name, layout.pp, layout.tp, layout.micro_batch, layout.recompute
        if key not in self.known_bytes:
            ranks = layout.stage_ranks(layout.ranks[layout.tp - 1])
            self.known_bytes[key] = max(activation_bytes(self.workload, call, layout, rank) for rank in ranks)
        return self.known_bytes[key]

    # ---- seconds: of all mini-batches, of one while streaming --------------------------------------------------------

    def _pass_s(
        self, call: ModelCall, layout: Layout, mesh: Mesh, stage: int, rows: float, backward: bool = False
    ) -> float:
        recompute = layout.recompute and backward
        key = call.name, mesh.kind[0], layout.pp, layout.tp, stage, rows, backward, recompute
        if key not in self.known_s:
            rank = layout.rank_at(0, stage, 0)
            tokens = rows * self.row_tokens * call.num_sequences
            self.known_s[key] = self.cost.pass_s(call, layout, rank, tokens, self.attended_tokens, backward=backward)
        return self.known_s[key]

    def _slowdown(self, mesh: Mesh) -> float:
        """Returns the factor by which ranks that share the cores of a node slow each other down."""
        device, counts = mesh.kind
        workers = self.cost.calibration.devices[device].num_workers
        return max(1.0, max(counts) / workers) if workers else 1.0

    def _passes_s(self, call: ModelCall, layout: Layout, mesh: Mesh, num_mini_batches: int) -> tuple[float, int]:
        """Returns seconds of the passes over some mini-batches, and the number of micro-batches."""
        rows = -(-self.workload.mini_batch // layout.dp)
        size = min(rows, layout.micro_batch or self.workload.micro_batch)
        number = -(-rows // size)
        kinds = (False, True) if isinstance(call, Train) else (False,)
        together = 1 if isinstance(call, Train) else num_mini_batches  # without waiting for other shards
        slowest = self.cost.slowest(together * rows * call.num_sequences, layout, together * number)
        if layout.pp == 1:
            parts = [size] * (rows // size) + [rows % size] * (rows % size > 0)
            once_s = sum(self._pass_s(call, layout, mesh, 0, part, backward) for part in parts for backward in kinds)
            return num_mini_batches * once_s * slowest * self._slowdown(mesh), num_mini_batches * number
        stages_s = [
            sum(self._pass_s(call, layout, mesh, stage, rows / number, backward) for backward in kinds)
            for stage in range(layout.pp)
        ]
        first = layout.stage_ranks(layout.ranks[0])
        num_bytes = pass_bytes(layout, self.workload, call)
        hops_s = sum(self.cost.message_s(a, b, num_bytes) for a, b in zip(first, first[1:], strict=False))
        once = number * together  # inference fills the pipeline once
        filled_s = slowest * (sum(stages_s) + (once - 1) * max(stages_s))
        return num_mini_batches // together * (
            filled_s * self._slowdown(mesh) + len(kinds) * hops_s
        ), num_mini_batches * number

    def _infer_s(self, call: ModelCall, layout: Layout, mesh: Mesh) -> tuple[float, float]:
        num, first = self.workload.num_mini_batches, layout.ranks[0]
        gather_s = self.cost.gather_s(call, layout, first)
        load_s = self.cost.load_s(call.model, layout, first) if layout.offload else 0.0
        whole_s, piece_s = (gather_s + self._passes_s(call, layout, mesh, number)[0] for number in (num, 1))
        whole_s *= sum(self._shares(call))
        return load_s + whole_s, load_s / num + piece_s

    def _train_s(self, call: ModelCall, layout: Layout, mesh: Mesh) -> tuple[float, float]:
        passes_s, number = self._passes_s(call, layout, mesh, 1)
        key = call.name, mesh.kind, layout.pp, layout.tp, layout.zero, layout.offload, number
        if key not in self.updates_s:
            ranks = [layout.rank_at(0, stage, layout.tp - 1) for stage in _ends(layout)]
            self.updates_s[key] = max(self.cost.update_s(call.model, layout, rank, number) for rank in ranks)
        step_s = passes_s + self.updates_s[key] * self._slowdown(mesh)
        return self.workload.epochs * self.workload.num_mini_batches * step_s, step_s

    def _shares(self, call: ModelCall) -> list[float]:
        """Returns the shares of the rows that a call computes in each round of sampling; [1.0] without rounds."""
        num = self.workload.rounds if call.name in repeated(self.workload.workflow) else 1
        return [share for number in range(num) if (share := self.workload.failed_groups**number)]

    def _generate_s(self, call: ModelCall, layout: Layout, mesh: Mesh) -> tuple[float, float]:
        workload, num = self.workload, self.workload.num_mini_batches
        last = layout.rank_at(layout.dp - 1, 0, 0)
        columns = layout.columns(last, workload.mini_batch)
        shards = {layout.columns(rank, workload.mini_batch) for rank in layout.ranks}
        rows = workload.generated_rows(max(shards, key=lambda one: (len(one), workload.num_distinct_prompts(one))))
        slow = self._slowdown(mesh)
        few = min(workload.max_sequences, DECODE_MINI_BATCHES * len(columns))
        gather_s = self.cost.gather_s(call, layout, last)
        rounds = [rows[: ceil(share * len(rows))] for share in self._shares(call)]
        whole_s, pieces_s = (
            sum(gather_s + slow * max(generate_s(self.cost, call, layout, last, some, places)) for some in rounds)
            for places in (workload.max_sequences, few)
        )
        if call.name in self.gates:
            whole_s += gather_s + self._passes_s(self.gates[call.name], layout, mesh, 1)[0]
        return whole_s, pieces_s / num


def are_beaten(costs: tuple[float, ...], front: Iterable[tuple[float, ...]]) -> bool:
    """Returns whether other costs are nowhere higher."""
    return any(all(map(le, other, costs)) for other in front)


def unbeaten(priced: Iterable[tuple[tuple[float, ...], T]]) -> Iterator[T]:
    """Yields, of things with their costs, those that no other one beats in all costs."""
    front: list[tuple[float, ...]] = []
    for costs, thing in sorted(priced, key=lambda pair: pair[0]):
        if not are_beaten(costs, front):
            front.append(costs)
            yield thing


def _worthwhile(found: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yields candidates on one mesh without those whose micro-batch saves less than LEAST_GAIN of the seconds of a
    smaller one."""
    least_s: dict[Layout, float] = {}
    for one in sorted(found, key=lambda one: one.layout.micro_batch or 0):
        rest = replace(one.layout, micro_batch=None)
        if one.seconds < (1 - LEAST_GAIN) * least_s.get(rest, inf):
            least_s[rest] = one.seconds
            yield one


def _ends(layout: Layout) -> tuple[int, ...]:
    """Returns the stages that may hold the most: the first with the embeddings, the last with the head."""
    return (0, layout.pp - 1) if layout.pp > 1 else (0,)
