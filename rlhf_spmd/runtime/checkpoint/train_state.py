"""The state of models in training, in a form that no layout determines: masters and moments as slices of parameters.

Each slice names its parameter, a box of it (held by a tensor-parallel shard) and the numbers [start, stop) of that box
flattened (updated by one data-parallel rank). Every number is written by one rank, so a checkpoint holds no copies. A
reader takes the numbers it needs from any number of files, so it may have another layout.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.model.parallel import is_split
from rlhf_spmd.plan.program.tensors import Box, Range, overlap, trained_weights_of
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.plan.workload import ModelShape
from rlhf_spmd.runtime.checkpoint.checkpoint_files import Checkpoint, reading, write
from rlhf_spmd.runtime.engines.adamw import Interval
from rlhf_spmd.runtime.engines.flat_layout import TIED
from rlhf_spmd.runtime.weights.rank_models import RankModels
from rlhf_spmd.runtime.weights.weight_sync import mover_of

KINDS = ("master", "exp_avg", "exp_avg_sq")  # AdamW's; masters are float32 (or the compute dtype if that is wider)
DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.int32: "I32", torch.uint8: "U8"}
Box2 = tuple[Range, Range]  # rows and columns of a whole parameter


@dataclass(frozen=True, slots=True)
class FlatSlice:
    """Numbers [start, stop) of a flattened box of a parameter."""

    box: Box2
    start: int
    stop: int

    @property
    def rows(self) -> Range:
        """The rows of the parameter that hold the slice, the first and the last one perhaps in part."""
        (top, _), (left, right) = self.box
        return top + self.start // (right - left), top - -self.stop // (right - left)

    @property
    def before(self) -> int:
        """How many numbers of the first row come before the slice."""
        (_, _), (left, right) = self.box
        return self.start % (right - left)

    def blank(self, dtype: torch.dtype) -> Tensor:
        """Returns a matrix for these rows, in which nothing is known: all NaN."""
        (top, bottom), (left, right) = self.rows, self.box[1]
        return torch.full((bottom - top, right - left), math.nan, dtype=dtype)

    def numbers(self, matrix: Tensor) -> Tensor:
        """Returns the numbers of the slice in a matrix of its rows, [stop - start], with the matrix's memory."""
        return matrix.view(-1)[self.before : self.before + self.stop - self.start]


def boxes_of(shape: ModelShape, shard: Shard) -> dict[str, Box2]:
    """Returns, for each parameter that trains, its parts in a shard, [rows, columns] of the whole; one dim counts as
    one column."""
    found: dict[str, Box2] = {}
    for weight in trained_weights_of(shape):
        box = weight.box(shard)
        if box is not None:
            found |= {name: (box[1], box[2]) for _, name in weight.parameters(box[0])}
    return found


# ---- writing ---------------------------------------------------------------------------------------------------------


def collect(models: RankModels) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Collects this rank's share of all models in training, copied to host memory, with the place of each tensor."""
    tensors: dict[str, Tensor] = {}
    places: dict[str, dict[str, list[int]]] = {}
    steps: dict[str, int] = {}
    for model, engine in models.engines.items():
        shard = _train_shard(models, model)
        boxes = boxes_of(models.program.workload.shape(model), shard)
        num_steps, slices = engine.optimizer_state()
        if slices:
            steps[model], places[model] = num_steps, {}
        for (name, start, stop), kinds in slices.items():
            if (shard.tp_index > 0 and not is_split(name)) or (name == TIED and shard.stage > 0):
                continue  # another rank of this copy of the model has the same numbers
            (r0, r1), (c0, c1) = boxes[name]
            places[model][f"{name}@{start}"] = [r0, r1, c0, c1, start, stop]
            for kind in KINDS:
                tensors[f"{model}.{kind}.{name}@{start}"] = kinds[kind].detach().to("cpu", copy=True)
    return tensors, {"places": json.dumps(places), "steps": json.dumps(steps)}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """Writes a safetensors file: a header, then the numbers -> its SHA-256. tensors: contiguous, on the CPU. Raises
    UserError."""
    header: dict[str, object] = {"__metadata__": dict(about)}
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    numbers = (memoryview(tensor.view(-1).view(torch.uint8).numpy()) for tensor in tensors.values())
    return write(path, [len(text).to_bytes(8, "little") + text, *numbers])


def _train_shard(models: RankModels, model: str) -> Shard:
    train = models.program.workload.workflow.train_call(model)
    assert train is not None, f"nothing trains the {model}"
    return models.program.placement.layouts[train.name].shard(models.world.rank)


# ---- reading ---------------------------------------------------------------------------------------------------------


class Reader:
    """All masters and moments of a verified checkpoint, whichever ranks wrote them."""

    def __init__(self, checkpoint: Checkpoint):
        """Raises UserError if a file can't be read."""
        from safetensors import safe_open

        self.checkpoint = checkpoint
        self.steps: dict[str, int] = {}
        # model, parameter -> files, keys and slices
        self.slices: dict[tuple[str, str], list[tuple[Any, str, FlatSlice]]] = {}
        for name in checkpoint.tensor_files:
            with reading(checkpoint.folder, name):
                file = safe_open(checkpoint.folder / name, framework="pt")
                about = {key: json.loads(text) for key, text in file.metadata().items()}
                self.steps |= about["steps"]
                for model, places in about["places"].items():
                    for key, (r0, r1, c0, c1, start, stop) in places.items():
                        held = FlatSlice(((r0, r1), (c0, c1)), start, stop)
                        self.slices.setdefault((model, key.partition("@")[0]), []).append((file, key, held))

    def read(self, model: str, kind: str, name: str, wanted: FlatSlice) -> Tensor:
        """Reads the numbers of a slice, [stop - start], on the CPU. Raises UserError if some are missing."""
        out = wanted.blank(torch.float32)
        with reading(self.checkpoint.folder, f"{model}.{kind}.{name}"):
            for file, key, held in self.slices.get((model, name), ()):
                common = overlap(((0, 1), held.rows, held.box[1]), ((0, 1), wanted.rows, wanted.box[1]))
                if common is None:
                    continue
                stored = file.get_tensor(f"{model}.{kind}.{key}")
                source, out = held.blank(stored.dtype), out.to(stored.dtype)
                held.numbers(source)[:] = stored
                part, target = _part(source, held, common), _part(out, wanted, common)
                target.copy_(torch.where(part.isnan(), target, part))
            numbers = wanted.numbers(out)
            if bool(numbers.isnan().any()):
                raise ValueError("numbers that this rank needs are missing")
        return numbers


def _part(matrix: Tensor, of: FlatSlice, box: Box) -> Tensor:
    """Returns a box of a parameter in the matrix of a slice's rows, with the matrix's memory."""
    (top, _), (left, _) = of.rows, of.box[1]
    _, (r0, r1), (c0, c1) = box
    return matrix[r0 - top : r1 - top, c0 - left : c1 - left]


def restore(models: RankModels, checkpoint: Checkpoint) -> None:
    """Loads a checkpoint into the engines of all ranks, which must not have stepped yet, and into all copies of their
    models. Collective; raises UserError on all ranks."""
    world = models.world
    with world.together("checking the checkpoint"):
        checkpoint.verify(sorted(checkpoint.files)[world.rank :: world.size])  # each file once
    with world.together("reading the checkpoint"):
        reader = Reader(checkpoint)
        for model, engine in models.engines.items():
            boxes = boxes_of(models.program.workload.shape(model), _train_shard(models, model))

            def read(kind: str, interval: Interval, model: str = model, boxes: Mapping[str, Box2] = boxes) -> Tensor:
                name, start, stop = interval
                return reader.read(model, kind, name, FlatSlice(boxes[name], start, stop))

            engine.load(reader.steps[model], read)
    for engine in models.engines.values():
        engine.publish()
    for transfer in models.program.transfers:  # to the other copies, as at the end of an iteration
        if transfer.reallocation is not None and world.rank in transfer.ranks:
            mover = mover_of(transfer, models, tag_base=0)
            mover.start()
            mover.finish()
