"""The part of a model that a rank holds: the layers of a pipeline stage, and a tensor-parallel slice of every weight.

One rule everywhere, also for uneven parts: part i of n things is [i * n // parts, (i + 1) * n // parts).
"""

from dataclasses import dataclass


def split(total: int, parts: int, index: int) -> range:
    """Returns part `index` of `total` things; parts differ in size by at most one."""
    return range(index * total // parts, (index + 1) * total // parts)


@dataclass(frozen=True, slots=True)
class Shard:
    """One place in a grid of pp stages and tp slices; the default is the whole model."""

    stage: int = 0
    pp: int = 1
    tp_index: int = 0
    tp: int = 1

    @property
    def is_last(self) -> bool:
        """Whether the stage is the last one, which has the head."""
        return self.stage == self.pp - 1

    def layers(self, total: int) -> range:
        """Returns the layers of the stage, of so many."""
        return split(total, self.pp, self.stage)

    def __str__(self) -> str:
        parts = [f"stage {self.stage} of {self.pp}"] if self.pp > 1 else []
        parts += [f"slice {self.tp_index} of {self.tp}"] if self.tp > 1 else []
        return ", ".join(parts) or "the whole model"
