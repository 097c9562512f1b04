"""A layout: ranks seen as one grid (dp, pp, tp), plus the ZeRO stage. A group is an index expression into the grid.

Rows of a rollout batch form a matrix [num_mini_batches, mini_batch]; a data-parallel shard owns *columns* of it. Hence
a row stays on its shard in every epoch (algorithms/training_order.py permutes inside columns only), every mini-batch is
spread evenly, and two layouts of different dp exchange plain column ranges.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from operator import index
from typing import TYPE_CHECKING, TypedDict, Unpack

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.shard import Shard

if TYPE_CHECKING:
    import numpy as np

COLLECTIVES, STAGES, HOST = "ranks", "stages", "host"  # purposes of groups


def consecutive(ranks: Iterable[int]) -> list[tuple[int, ...]]:
    """Splits ranks, in their order, into runs of consecutive ones; each negative number, which is not a rank, is a run
    by itself."""
    runs = groupby(enumerate(ranks), key=lambda pair: (pair[1] - pair[0], min(pair[1], 0)))
    return [tuple(rank for _, rank in run) for _, run in runs]


def format_ranks(ranks: tuple[int, ...]) -> str:
    """Returns ranks as text, runs folded: (0, 1, 2, 5) -> "0-2,5"; negative ones stay apart: "-1,0"."""
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in consecutive(ranks))


class Limits(TypedDict, total=False):
    """The fields of a Layout that limit a forward pass."""

    micro_batch: int | None
    tokens: int | None


class LayoutOptions(Limits, total=False):
    """The fields of a Layout besides ranks and grid."""

    zero: int
    recompute: bool
    offload: bool


@dataclass(frozen=True)
class Layout:
    """Where and how one call runs.

    ranks: world ranks in grid order; dp * pp * tp must equal their number. The first dp shard owns the first columns of
    every mini-batch, and so on, so the order of the ranks decides which rank owns which rows.
    zero: ZeRO stage of a trained model over dp (0: replicated, 1: optimizer state, 2: + gradients, 3: + weights).
    micro_batch: sequences per forward on one data-parallel shard; None takes the workload's.
    tokens: alternatively, the most tokens per forward (one sequence at least).
    recompute: training keeps only the input of each layer and recomputes its activations in the backward pass.
    offload: the weights of a frozen model stay in host memory between its calls; of a call that trains, the optimizer's
        states, from where each part comes for its update.
    """

    ranks: tuple[int, ...]
    dp: int
    pp: int = 1
    tp: int = 1
    zero: int = 0
    micro_batch: int | None = None
    tokens: int | None = None
    recompute: bool = False
    offload: bool = False

    def __post_init__(self) -> None:
        try:  # lists, ranges and numpy integers are accepted, but all ranks must store the same types
            object.__setattr__(self, "ranks", tuple(index(rank) for rank in self.ranks))
            given = [name for name in ("micro_batch", "tokens") if getattr(self, name) is not None]
            for name in ("dp", "pp", "tp", "zero", *given):
                object.__setattr__(self, name, index(getattr(self, name)))
        except TypeError as error:
            raise UserError(f"a layout is made of whole numbers ({error}): {self}, ranks {self.ranks!r}") from error

    @classmethod
    def data_parallel(cls, ranks: Iterable[int], **options: Unpack[LayoutOptions]) -> "Layout":
        """Returns a layout in which every rank holds a replica (or its ZeRO shard) of the whole model.

        options: any other field.
        """
        ranks = tuple(ranks)
        return cls(ranks, dp=len(ranks), **options)

    @classmethod
    def grid_of(cls, ranks: Iterable[int], *, pp: int = 1, tp: int = 1, **options: Unpack[LayoutOptions]) -> "Layout":
        """Returns a layout of as many data-parallel shards of pp x tp ranks as fit; tp ranks are neighbours. If pp * tp
        does not divide the number of ranks, `problems` reports it."""
        ranks = tuple(ranks)
        return cls(ranks, dp=max(1, len(ranks) // max(pp * tp, 1)), pp=pp, tp=tp, **options)

    def on(self, ranks: Iterable[int]) -> "Layout":
        """Returns the same grid on other ranks, with as many data-parallel shards as fit."""
        ranks = tuple(ranks)
        return replace(self, ranks=ranks, dp=max(1, len(ranks) // max(self.pp * self.tp, 1)))

    @property
    def of_inference(self) -> "Layout":
        """Returns the layout without what only a call that trains has."""
        return replace(self, recompute=False, offload=False)

    @property
    def grid(self) -> "np.ndarray":
        """World ranks as an array [dp, pp, tp]."""
        import numpy as np  # late: `check` starts sooner without it

        return np.array(self.ranks).reshape(self.dp, self.pp, self.tp)

    # ---- groups: what `grid` indexes; all in grid order -------------------------------------------------------------

    @property
    def group(self) -> str:
        """Name of the group of all ranks of this layout."""
        return group_name(self.ranks)

    @cached_property
    def _numbers(self) -> dict[int, int]:
        """The index of each rank in `ranks`."""
        return {rank: number for number, rank in enumerate(self.ranks)}

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Returns the indices of a world rank in the grid: dp, stage, tp."""
        dp_index, rest = divmod(self._numbers[rank], self.pp * self.tp)
        return dp_index, *divmod(rest, self.tp)

    def rank_at(self, dp_index: int, stage: int, tp_index: int) -> int:
        """Returns the world rank at some `coordinates`."""
        return self.ranks[(dp_index * self.pp + stage) * self.tp + tp_index]

    def dp_index(self, rank: int) -> int:
        """Returns the data-parallel shard that a world rank belongs to."""
        return self._numbers[rank] // (self.pp * self.tp)

    def shard(self, rank: int) -> Shard:
        """Returns the part of the model that a world rank computes with."""
        _, stage, tp_index = self.coordinates(rank)
        return Shard(stage, self.pp, tp_index, self.tp)

    def same_shards(self, other: "Layout") -> bool:
        """Returns whether both have the same copies of the model on the same ranks."""
        if (self.pp, self.tp) != (other.pp, other.tp):
            return False
        return self.ranks == other.ranks or set(self._copies()) == set(other._copies())

    def _copies(self) -> Iterator[tuple[int, ...]]:
        """Returns the ranks of each copy of the model."""
        size = max(self.pp * self.tp, 1)
        return (self.ranks[start : start + size] for start in range(0, len(self.ranks), size))

    def tensor_ranks(self, rank: int) -> tuple[int, ...]:
        """Returns the tensor-parallel slices of a rank's stage."""
        start = self._numbers[rank] // self.tp * self.tp
        return self.ranks[start : start + self.tp]

    def data_ranks(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that hold the same shard of the model as a rank."""
        size = self.pp * self.tp
        return self.ranks[self._numbers[rank] % size :: size]

    def sum_grid(self, rank: int, node_of: Callable[[int], int]) -> list[tuple[int, ...]]:
        """Returns `data_ranks` as a grid, a row for each node: gradients are summed over rows first, then over columns.
        ZeRO 3 sums all at once, in one column; so do nodes with different numbers of these ranks.

        node_of: the node of a rank.
        """
        data = sorted(self.data_ranks(rank))
        rows = [tuple(row) for _, row in groupby(data, node_of)]
        return rows if self.zero < 3 and len(set(map(len, rows))) == 1 else [(one,) for one in data]

    def sum_ranks(self, rank: int, node_of: Callable[[int], int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the row and the column of a rank in `sum_grid`."""
        rows = self.sum_grid(rank, node_of)
        (row,) = (row for row in rows if rank in row)
        return row, tuple(other[row.index(rank)] for other in rows)

    def model_ranks(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that hold a copy of the model together with a rank."""
        start = self.dp_index(rank) * self.pp * self.tp
        return self.ranks[start : start + self.pp * self.tp]

    def stage_ranks(self, rank: int) -> tuple[int, ...]:
        """Returns the stages of a rank's slice."""
        return self.model_ranks(rank)[self.coordinates(rank)[2] :: self.tp]

    def tied_ranks(self, rank: int) -> tuple[int, ...]:
        """Returns the first and the last stage of a rank's slice, which share tied embeddings; any other rank alone."""
        stages = self.stage_ranks(rank)
        return tuple(dict.fromkeys((stages[0], stages[-1]))) if rank in (stages[0], stages[-1]) else (rank,)

    @property
    def last_stage(self) -> tuple[int, ...]:
        """The ranks that compute a model's output, and so its results and losses."""
        if self.pp == 1:
            return self.ranks
        return tuple(self.rank_at(d, self.pp - 1, t) for d in range(self.dp) for t in range(self.tp))

    def reports(self, rank: int) -> bool:
        """Returns whether a rank reports for its data-parallel shard, so that sums over ranks count each row once."""
        _, stage, tp_index = self.coordinates(rank)
        return stage == self.pp - 1 and tp_index == 0

    # ---- rows -------------------------------------------------------------------------------------------------------

    def columns(self, rank: int, mini_batch: int) -> range:
        """Returns the columns of [num_mini_batches, mini_batch] that a world rank of this layout owns; may be empty."""
        shard = self.dp_index(rank)
        return range(shard * mini_batch // self.dp, (shard + 1) * mini_batch // self.dp)

    def problems(self) -> list[str]:
        """Returns the problem of the grid itself, in words; empty if there is none."""
        ranks, pp, tp = list(self.ranks), self.pp, self.tp
        copies = list(map(list, self._copies())) if pp * tp > 1 else []
        descending = next((copy for copy in copies if copy != sorted(copy)), None)
        limits = [limit for limit in (self.micro_batch, self.tokens) if limit is not None]
        problems = [
            (not ranks, "no rank is left for it; give it at least one"),
            (len(set(ranks)) != len(ranks), f"a rank appears twice in {ranks}; name each rank once"),
            (
                min(self.dp, pp, tp) < (1 if ranks else 0) or self.dp * pp * tp != len(ranks),
                f"dp {self.dp} x pp {pp} x tp {tp} is not the number of ranks, {len(ranks)}, or one is less than 1; "
                "change one of them",
            ),
            (self.zero not in (0, 1, 2, 3), f"ZeRO stage {self.zero} does not exist; use 0, 1, 2 or 3"),
            (
                len(limits) > 1 or min(limits, default=1) < 1,
                f"micro_batch {self.micro_batch} and tokens {self.tokens} say how much a forward takes; give one of "
                "them, at least 1",
            ),
            (
                pp > 1 and self.zero > 2,
                f"ZeRO {self.zero} with pp {pp}: DeepSpeed would gather a stage's weights for every pass of a "
                "micro-batch; use ZeRO 0 to 2, or pp 1",
            ),
            (
                descending is not None,
                f"ranks {descending}, which hold one copy of the model together, do not ascend; list them in "
                "ascending order",
            ),
        ]
        return [text for applies, text in problems if applies]

    def __str__(self) -> str:
        zero = f" zero{self.zero}" if self.zero else ""
        options = [zero, " recompute" if self.recompute else "", " offload" if self.offload else ""]
        return f"dp{self.dp} pp{self.pp} tp{self.tp}{''.join(options)}"


def group_name(ranks: Iterable[int], purpose: str = COLLECTIVES) -> str:
    """Returns the name of a set of ranks with a purpose: collectives, messages between the stages of a call, or rows
    through host memory. Groups of the same ranks with different purposes are different communicators."""
    return _group_name(tuple(ranks), purpose)


@lru_cache(maxsize=65536)
def _group_name(ranks: tuple[int, ...], purpose: str) -> str:
    return f"{purpose} {format_ranks(tuple(sorted(ranks)))}"


def cut(lengths: Sequence[int], layout: Layout, micro_batch: int) -> list[slice]:
    """Cuts rows into micro-batches: consecutive rows with at most layout.tokens tokens together, or at most micro_batch
    rows; at least one row each.

    lengths: tokens of each row.

    Layouts with the same limits cut the same rows alike, so a recomputed logprob has the same shapes, and hence the
    same bits, as the first one that training computes.
    """
    if layout.tokens is None:
        return [slice(start, min(start + micro_batch, len(lengths))) for start in range(0, len(lengths), micro_batch)]
    parts: list[slice] = []
    start = held = 0
    for row, length in enumerate(lengths):
        if row > start and held + length > layout.tokens:
            parts.append(slice(start, row))
            start, held = row, 0
        held += length
    return parts + ([slice(start, len(lengths))] if lengths else [])


def exact_div(total: int, parts: int, what: str) -> int:
    """Returns total / parts. Raises a UserError that names `what` if there is a remainder."""
    if parts < 1 or total % parts:
        raise UserError(f"{what}: {total} is not divisible by {parts}")
    return total // parts
