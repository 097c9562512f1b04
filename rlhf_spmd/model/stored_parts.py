"""Which tensors of a folder make one of a model: one table for reading and writing.

Most are the same under both names. All experts of a layer are one matrix here; a folder has a matrix for each, or, as
transformers has them in memory, one tensor [experts, rows, columns]. The other way round, a folder may have one matrix
for several of ours: for queries, keys and values, or for gate and up; ours are its rows, or those of each head.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.families import FAMILIES
from rlhf_spmd.model.stored_names import BODY, HEADS, hugging_face_names, stored_name

ALL = (slice(None),)


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a folder: `num_rows` rows of one of ours from `first` on; all of it, if that stands there as it is
    (`whole`); or, with `inside`, as many rows of that tensor of the folder from `at` on.

    name: Hugging Face's usual one, by which it is read.
    shape: of the tensor of the folder.
    transposed: whether its columns are our rows.
    """

    name: str
    shape: torch.Size
    first: int = 0
    num_rows: int = 0
    whole: bool = True
    inside: str = ""
    at: int = 0
    transposed: bool = False

    @property
    def there(self) -> str:
        """The name of the tensor of the folder."""
        return self.inside or self.name

    def slices(self, part: tuple[slice, ...], num_rows: int) -> tuple[slice, ...] | None:
        """Returns what to read of it for a part of our tensor, which has `num_rows` rows; None: nothing."""
        found = self._slices(part, num_rows)
        if found is None or found == ALL or not self.transposed:
            return found
        return (*found[1:], slice(None))[0], found[0]

    def _slices(self, part: tuple[slice, ...], num_rows: int) -> tuple[slice, ...] | None:
        if self.whole:
            return part
        start, stop, _ = part[0].indices(num_rows)
        start, stop = max(start - self.first, 0), min(stop - self.first, self.num_rows)
        if self.inside:
            return (slice(self.at + start, self.at + stop),) if start < stop else None
        unit = self.num_rows // self.shape[0]
        start, stop = start // unit, stop // unit
        if (start, stop) == (0, self.shape[0]):
            return ALL
        return (slice(start, stop),) if start < stop else None


def to_hf_name(name: str) -> str:
    """Converts our name of a tensor to Hugging Face's."""
    return name if name in HEADS else BODY + name


def stored_path(layer: str, config: ModelConfig) -> str:
    """Converts our name of a layer, or of a matrix that is several of ours, to that in folders of the family."""
    return stored_name(f"{to_hf_name(layer)}.weight", FAMILIES[config.model_type]).removesuffix(".weight")


def parts_of(
    name: str, shapes: Mapping[str, torch.Size], config: ModelConfig, there: Container[str] = ()
) -> list[Part]:
    """Returns the parts of a folder that are our tensor, one below the other. Raises UserError for experts that are
    there twice.

    shapes: of all our tensors.
    there: the names in the folder, if one is read.
    """
    family, shape = FAMILIES[config.model_type], shapes[name]
    module, _, kind = name.rpartition(".")
    *layer, matrix = module.split(".", 2)
    is_turned = family.transposed and bool(layer) and len(shape) == 2
    for joint, rows in family.joint.items():
        if matrix in rows:
            of_layer = {inner: f"{'.'.join(layer)}.{inner}.{kind}" for inner in (joint, *rows)}
            num = config.num_kv_heads if family.joint_by_head else 1
            above = [shapes[of_layer[inner]][0] // num for inner in rows]
            number, block = rows.index(matrix), sum(above)
            size, at = torch.Size((block * num, *shape[1:])), sum(above[:number])
            inside, own = to_hf_name(of_layer[joint]), above[number]
            size = size[::-1] if is_turned else size
            return [
                Part(f"{to_hf_name(name)}/{i}", size, i * own, own, False, inside, i * block + at, is_turned)
                for i in range(num)
            ]
    names = family.tensors.get(matrix, ()) if layer else ()
    if not names:
        return [Part(to_hf_name(name), shape[::-1] if is_turned else shape, transposed=is_turned)]
    place, of_experts = f"{BODY}{'.'.join(layer)}.", "{}" in names[0]
    num = config.num_experts if of_experts else 1
    apart = [f"{place}{inner}.weight".format(expert) for expert in range(num) for inner in names]
    together = place + matrix if of_experts else to_hf_name(name)
    if together not in there:
        size = torch.Size((shape[0] // len(apart), shape[1]))
        return [Part(each, size, number * size[0], size[0], whole=False) for number, each in enumerate(apart)]
    if apart[0] in there:
        raise UserError(f"it holds {together} and, as a part of it, {apart[0]}; remove one of the two forms")
    if not of_experts:
        return [Part(together, shape)]
    return [Part(together, torch.Size((num, shape[0] // num, shape[1])), 0, shape[0], whole=False)]


def table_of(
    shapes: Mapping[str, torch.Size], config: ModelConfig, there: Container[str] = ()
) -> dict[str, list[Part]]:
    """Returns the parts of all our tensors, see `parts_of`."""
    return {name: parts_of(name, shapes, config, there) for name in shapes}


def joined(parts: Iterable[Part], tensors: dict[str, Tensor]) -> Tensor:
    """Takes the parts that were read out of `tensors` -> our tensor, or the part of it."""
    read = [(part, tensors.pop(part.name)) for part in parts if part.name in tensors]
    read = [(part, tensor.T.contiguous() if part.transposed else tensor) for part, tensor in read]
    if len(read) == 1 and (read[0][0].whole or read[0][0].inside):
        return read[0][1]
    return torch.cat([tensor if part.inside else tensor.flatten(0, -2) for part, tensor in read])


def stored_of(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Returns what a folder has of our tensors, by their names there. Copied are those of which one is several of
    ours."""
    family = FAMILIES[config.model_type]
    shapes = {name: tensor.shape for name, tensor in state.items()}
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    turned = set[str]()
    for name, tensor in state.items():
        for part in parts_of(name, shapes, config):
            rows = tensor if part.whole else tensor[part.first : part.first + part.num_rows]
            there = stored_name(part.there, family)
            pieces.setdefault(there, []).append((part.at, rows))
            turned |= {there} if part.transposed else set()
    in_order = {name: [rows for _, rows in sorted(few, key=itemgetter(0))] for name, few in pieces.items()}
    stored = {name: rows[0] if len(rows) == 1 else torch.cat(rows) for name, rows in in_order.items()}
    return {name: one.T if name in turned else one for name, one in stored.items()}


def ours_of(stored: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], config: ModelConfig) -> dict[str, Tensor]:
    """Returns our tensors of those that a folder has, by their names there.

    shapes: of ours.
    """
    ours, names = {}, hugging_face_names(stored, FAMILIES[config.model_type])
    for name, parts in table_of(shapes, config, names).items():
        read = {part.name: stored[names[part.there]][part.slices(ALL, shapes[name][0])] for part in parts}
        ours[name] = joined(parts, read)
    return ours
