"""Which tensors of a folder make one of a model: one table for reading and writing.

Most are the same under both names. All experts of a layer are one matrix here; a folder has a matrix for each, or, as
transformers has them in memory, one tensor [experts, rows, columns]. The other way round, a folder may have one matrix
for several of ours: for queries, keys and values, or for gate and up.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from operator import itemgetter

import torch
from torch import Tensor

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.families import FAMILIES
from rlhf_spmd.model.stored_names import BODY, HEADS

ALL = (slice(None),)


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a folder: the rows of one of ours from `first` on; whole, if that stands there as it is; or, with
    `inside`, the rows of that tensor of the folder from `first` on, which are all of ours.

    name: Hugging Face's, by which it is read.
    shape: of the tensor of the folder.
    """

    name: str
    shape: torch.Size
    first: int = 0
    whole: bool = True
    inside: str = ""

    @property
    def there(self) -> str:
        """The name of the tensor of the folder."""
        return self.inside or self.name

    @property
    def num_rows(self) -> int:
        return prod(self.shape[:-1])

    def slices(self, part: tuple[slice, ...], num_rows: int) -> tuple[slice, ...] | None:
        """Returns what to read of it for a part of our tensor, which has `num_rows` rows; None: nothing."""
        if self.whole:
            return part
        start, stop, _ = part[0].indices(num_rows)
        if self.inside:
            return (slice(self.first + start, self.first + stop),)
        unit = self.num_rows // self.shape[0]
        start, stop = max(start - self.first, 0) // unit, min(stop - self.first, self.num_rows) // unit
        if (start, stop) == (0, self.shape[0]):
            return ALL
        return (slice(start, stop),) if start < stop else None


def to_hf_name(name: str) -> str:
    """Converts our name of a tensor to Hugging Face's."""
    return name if name in HEADS else BODY + name


def parts_of(
    name: str, shapes: Mapping[str, torch.Size], config: ModelConfig, there: Container[str] = ()
) -> list[Part]:
    """Returns the parts of a folder that are our tensor, one below the other. Raises UserError for experts that are
    there twice.

    shapes: of all our tensors.
    there: the names in the folder, if one is read.
    """
    family, shape = FAMILIES[config.model_type], shapes[name]
    *layer, matrix = name.removesuffix(".weight").split(".", 2)
    for joint, rows in family.joint.items():
        if matrix in rows:
            of_layer = {inner: f"{'.'.join(layer)}.{inner}.weight" for inner in (joint, *rows)}
            above = [shapes[of_layer[inner]][0] for inner in rows]
            size = torch.Size((sum(above), *shape[1:]))
            first = sum(above[: rows.index(matrix)])
            return [Part(to_hf_name(name), size, first, whole=False, inside=to_hf_name(of_layer[joint]))]
    names = family.tensors.get(matrix, ()) if layer else ()
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
    return {name: parts_of(name, shapes, config, there) for name in shapes}


def joined(parts: Iterable[Part], tensors: dict[str, Tensor]) -> Tensor:
    """Takes the parts that were read out of `tensors` -> our tensor, or the part of it."""
    read = [(part, tensors.pop(part.name)) for part in parts if part.name in tensors]
    if len(read) == 1 and (read[0][0].whole or read[0][0].inside):
        return read[0][1]
    return torch.cat([tensor.flatten(0, -2) for _, tensor in read])


def stored_of(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Returns what a folder has of our tensors, by Hugging Face's name. Copied are those of which one is several of
    ours."""
    shapes = {name: tensor.shape for name, tensor in state.items()}
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    for name, tensor in state.items():
        for part in parts_of(name, shapes, config):
            rows = tensor if part.whole or part.inside else tensor[part.first : part.first + part.num_rows]
            pieces.setdefault(part.there, []).append((part.first, rows))
    in_order = {name: [rows for _, rows in sorted(few, key=itemgetter(0))] for name, few in pieces.items()}
    return {name: rows[0] if len(rows) == 1 else torch.cat(rows) for name, rows in in_order.items()}


def ours_of(stored: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], config: ModelConfig) -> dict[str, Tensor]:
    """Returns our tensors of those that a folder has, by Hugging Face's name.

    shapes: of ours.
    """
    ours = {}
    for name, parts in table_of(shapes, config, stored).items():
        read = {part.name: stored[part.there][part.slices(ALL, shapes[name][0])] for part in parts}
        ours[name] = joined(parts, read)
    return ours
