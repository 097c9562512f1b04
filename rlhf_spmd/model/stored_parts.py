"""Which tensors of a folder make one of a model: one table for reading and writing.

Most are the same under both names. All experts of a layer are one matrix here; a folder has a matrix for each, or, as
transformers has them in memory, one tensor [experts, rows, columns].
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.families import FAMILIES
from rlhf_spmd.model.stored_names import BODY, HEADS


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a folder, with Hugging Face's name: the rows of one of ours from `first` on; whole, if that stands
    there as it is."""

    name: str
    shape: torch.Size
    first: int = 0
    whole: bool = True

    @property
    def num_rows(self) -> int:
        return prod(self.shape[:-1])

    def slices(self, part: tuple[slice, ...], num_rows: int) -> tuple[slice, ...] | None:
        """Returns what to read of it for a part of our tensor, which has `num_rows` rows; None: nothing."""
        if self.whole:
            return part
        start, stop, _ = part[0].indices(num_rows)
        unit = self.num_rows // self.shape[0]
        start, stop = max(start - self.first, 0) // unit, min(stop - self.first, self.num_rows) // unit
        if (start, stop) == (0, self.shape[0]):
            return (slice(None),)
        return (slice(start, stop),) if start < stop else None


def to_hf_name(name: str) -> str:
    """Converts our name of a tensor to Hugging Face's."""
    return name if name in HEADS else BODY + name


def parts_of(name: str, shape: torch.Size, config: ModelConfig, there: Container[str] = ()) -> list[Part]:
    """Returns the parts of a folder that are our tensor, one below the other. Raises UserError for experts that are
    there twice.

    there: the names in the folder, if one is read.
    """
    *layer, matrix = name.removesuffix(".weight").split(".", 2)
    names = FAMILIES[config.model_type].tensors.get(matrix, ()) if layer else ()
    if not names:
        return [Part(to_hf_name(name), shape)]
    place, of_experts = f"{BODY}{'.'.join(layer)}.", "{}" in names[0]
    num = config.num_experts if of_experts else 1
    apart = [f"{place}{inner}.weight".format(expert) for expert in range(num) for inner in names]
    together = place + matrix if of_experts else to_hf_name(name)
    if together not in there:
        size = torch.Size((shape[0] // len(apart), shape[1]))
        return [Part(each, size, number * size[0], whole=False) for number, each in enumerate(apart)]
    if apart[0] in there:
        raise UserError(f"it holds {together} and, as a part of it, {apart[0]}; remove one of the two forms")
    if not of_experts:
        return [Part(together, shape)]
    return [Part(together, torch.Size((num, shape[0] // num, shape[1])), whole=False)]


def table_of(
    shapes: Mapping[str, torch.Size], config: ModelConfig, there: Container[str] = ()
) -> dict[str, list[Part]]:
    """Returns the parts of all our tensors, see `parts_of`."""
    return {name: parts_of(name, shape, config, there) for name, shape in shapes.items()}


def joined(parts: list[Part], tensors: dict[str, Tensor]) -> Tensor:
    """Takes the parts that were read out of `tensors` -> our tensor, or the part of it."""
    read = [tensors.pop(part.name) for part in parts if part.name in tensors]
    if parts[0].whole:
        return read[0]
    return torch.cat([part.flatten(0, -2) for part in read])


def cut(name: str, tensor: Tensor, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yields what a folder has of our tensor, by Hugging Face's name, without copies."""
    for part in parts_of(name, tensor.shape, config):
        yield part.name, tensor if part.whole else tensor[part.first : part.first + part.num_rows]
