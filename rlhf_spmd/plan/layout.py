"""A layout: ranks seen as one grid (dp, pp, tp), plus the ZeRO stage. A group is an index expression into the grid.

Rows of a rollout batch form a matrix [num_mini_batches, mini_batch]; a data-parallel shard owns *columns* of it. Hence
a row stays on its shard in every epoch (algorithms/order.py permutes inside columns only), every mini-batch is spread
evenly, and two layouts of different dp exchange plain column ranges.
"""

from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING

from rlhf_spmd.errors import UserError

if TYPE_CHECKING:
    import numpy as np


def format_ranks(ranks: tuple[int, ...]) -> str:
    """Ranks as text, runs folded: (0, 1, 2, 5) -> "0-2,5"; negative ones, which are none, stay apart: "-1,0"."""
    parts: list[str] = []
    start = previous = None
    for rank in (*ranks, None):
        if previous is not None and previous >= 0 and rank == previous + 1:
            previous = rank
            continue
        if previous is not None:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = rank
    return ",".join(parts)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where and how one call runs.

    ranks: world ranks in grid order; dp * pp * tp must equal their number. The first dp shard has the first columns of
    every mini-batch, and so on: which rank owns which rows is the order of the ranks.
    zero: ZeRO stage of a trained model over dp (0: replicated, 1: optimizer state, 2: + gradients, 3: + weights).
    micro_batch: sequences per forward on one data-parallel shard; None takes the workload's.
    """

    ranks: tuple[int, ...]
    dp: int
    pp: int = 1
    tp: int = 1
    zero: int = 0
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        try:  # lists, ranges and numpy integers are welcome, but ranks must agree on one spelling
            object.__setattr__(self, "ranks", tuple(index(rank) for rank in self.ranks))
            for name in ("dp", "pp", "tp", "zero", *(() if self.micro_batch is None else ("micro_batch",))):
                object.__setattr__(self, name, index(getattr(self, name)))
        except TypeError as error:
            raise UserError(f"a layout is made of whole numbers ({error}): {self}, ranks {self.ranks!r}") from error

    @classmethod
    def data_parallel(cls, ranks, *, zero: int = 0, micro_batch: int | None = None) -> "Layout":
        """Every rank holds a replica (or its ZeRO shard) of the whole model."""
        ranks = tuple(ranks)
        return cls(ranks, dp=len(ranks), zero=zero, micro_batch=micro_batch)

    @property
    def grid(self) -> "np.ndarray":
        """World ranks as an array [dp, pp, tp]."""
        import numpy as np  # late: `check` does without, and starts sooner

        return np.array(self.ranks).reshape(self.dp, self.pp, self.tp)

    @property
    def group(self) -> str:
        """Name of the group of all ranks of this layout; a group is a set, whatever the order of the grid."""
        return f"ranks {format_ranks(tuple(sorted(self.ranks)))}"

    def dp_index(self, rank: int) -> int:
        """Which data-parallel shard a world rank belongs to."""
        return self.ranks.index(rank) // (self.pp * self.tp)

    def columns(self, rank: int, mini_batch: int) -> range:
        """Columns of [num_mini_batches, mini_batch] that a world rank of this layout owns; may be empty."""
        shard = self.dp_index(rank)
        return range(shard * mini_batch // self.dp, (shard + 1) * mini_batch // self.dp)

    def problems(self) -> list[str]:
        """What is wrong with the grid itself, in words; empty if nothing is."""
        found = []
        if not self.ranks:
            found.append("it has no ranks; give it at least one")
        if len(set(self.ranks)) != len(self.ranks):
            found.append(f"a rank appears twice in {list(self.ranks)}; name each rank once")
        if min(self.dp, self.pp, self.tp) < (1 if self.ranks else 0):
            found.append(f"dp {self.dp}, pp {self.pp}, tp {self.tp}: none may be less than 1")
        if self.dp * self.pp * self.tp != len(self.ranks):
            grid = f"dp {self.dp} x pp {self.pp} x tp {self.tp}"
            found.append(f"{grid} is not the number of ranks, {len(self.ranks)}; change one of them")
        if self.zero not in (0, 1, 2, 3):
            found.append(f"ZeRO stage {self.zero} does not exist; use 0, 1, 2 or 3")
        if self.micro_batch is not None and self.micro_batch < 1:
            found.append(f"micro_batch {self.micro_batch} is less than 1; raise it, or give None")
        return found

    def __str__(self) -> str:
        zero = f" zero{self.zero}" if self.zero else ""
        return f"dp{self.dp} pp{self.pp} tp{self.tp}{zero}"


def exact_div(total: int, parts: int, what: str) -> int:
    """total / parts when that is whole; otherwise a UserError that names `what`."""
    if parts < 1 or total % parts:
        raise UserError(f"{what}: {total} is not divisible by {parts}")
    return total // parts
