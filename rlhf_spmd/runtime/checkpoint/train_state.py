"""The state of models in training, in a form that no layout determines: masters and moments as slices of parameters.

Each slice names its parameter, a box of it (held by a tensor-parallel shard) and the numbers [start, stop) of that box
flattened (updated by one data-parallel rank). Every number is written by one rank, so a checkpoint holds no copies. A
reader takes the numbers it needs from any number of files, so it may have another layout.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.model.parallel import is_split
from rlhf_spmd.plan.program.tensors import Range, overlap, rectangles, trained_weights_of
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.plan.workload import ModelShape
from rlhf_spmd.runtime.checkpoint.checkpoint_files import Checkpoint, FileRecord, unusable, write
from rlhf_spmd.runtime.engines.flat_engine import TIED, Interval
from rlhf_spmd.runtime.weights.rank_models import RankModels
from rlhf_spmd.runtime.weights.weight_sync import mover_of

KINDS = ("master", "exp_avg", "exp_avg_sq")  # AdamW's; masters are float32 (or the compute dtype if that is wider)
DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.int32: "I32"}
Box2 = tuple[Range, Range]  # rows and columns of a whole parameter


@dataclass(frozen=True, slots=True)
class FlatSlice:
    """Numbers [start, stop) of a flattened box of a parameter."""

    box: Box2
    start: int
    stop: int

    def rectangles(self) -> Iterator[tuple[Box2, int]]:
        """Yields the slice as rectangles of the whole parameter, each with how many numbers of the slice come before
        it."""
        (top, _), (left, right) = self.box
        done = 0
        for (r0, r1), (c0, c1) in rectangles(self.start, self.stop, width=right - left):
            yield ((r0 + top, r1 + top), (c0 + left, c1 + left)), done
            done += (r1 - r0) * (c1 - c0)


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
            places[model][name] = [r0, r1, c0, c1, start, stop]
            for kind in KINDS:
                tensors[f"{model}.{kind}.{name}"] = kinds[kind].detach().to("cpu", copy=True)
    return tensors, {"places": json.dumps(places), "steps": json.dumps(steps)}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> FileRecord:
    """Writes a safetensors file: a header, then the numbers. tensors: contiguous, on the CPU. Raises UserError."""
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

    def __init__(self, checkpoint: Checkpoint, shapes: Mapping[str, ModelShape]):
        """shapes: of the models in training. Raises UserError if the files do not fit them."""
        from safetensors import SafetensorError, safe_open

        self.checkpoint = checkpoint
        self.files: dict[str, Any] = {}  # open ones, of safetensors
        self.steps: dict[str, int] = {}
        self.slices: dict[tuple[str, str], list[tuple[str, FlatSlice]]] = {}  # model, parameter -> file and slice
        whole = {model: boxes_of(shape, Shard()) for model, shape in shapes.items()}
        for file in checkpoint.tensor_files:
            path = checkpoint.folder / file
            try:
                self.files[file] = safe_open(path, framework="pt")
                about = self.files[file].metadata() or {}
                places = {model: dict(found) for model, found in json.loads(about["places"]).items()}
                steps = {model: int(num) for model, num in json.loads(about["steps"]).items()}
            except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise unusable(checkpoint.folder, f"{path} can't be read ({type(error).__name__}: {error})") from None
            for model, found in places.items():
                for name, place in found.items():
                    held = self._slice(path, place, whole.get(model, {}).get(name), f"{model}: {name}")
                    self.slices.setdefault((model, name), []).append((file, held))
            for model, num in steps.items():
                if self.steps.setdefault(model, num) != num:
                    raise unusable(
                        checkpoint.folder, f"{path} has {num} optimizer steps of {model}, not {self.steps[model]}"
                    )

    def _slice(self, path: Path, place: object, whole: Box2 | None, what: str) -> FlatSlice:
        if whole is None:
            raise unusable(self.checkpoint.folder, f"{path} holds {what}, which the model does not have")
        if isinstance(place, list) and len(place) == 6 and all(isinstance(number, int) for number in place):
            r0, r1, c0, c1, start, stop = place
            inside = 0 <= r0 < r1 <= whole[0][1] and 0 <= c0 < c1 <= whole[1][1]
            if inside and 0 <= start < stop <= (r1 - r0) * (c1 - c0):
                return FlatSlice(((r0, r1), (c0, c1)), start, stop)
        shape = f"{whole[0][1]} x {whole[1][1]}"
        raise unusable(self.checkpoint.folder, f"{path} places {what} at {place!r}, but the parameter is {shape}")

    def read(self, model: str, kind: str, name: str, wanted: FlatSlice) -> Tensor:
        """Reads the numbers of a slice, [stop - start], on the CPU. Raises UserError if some are missing."""
        out, num_found = None, 0
        for file, held in self.slices.get((model, name), ()):
            shared = list(_shared(held, wanted))
            if not shared:
                continue
            stored = self._stored(file, f"{model}.{kind}.{name}", held)
            if out is None:
                out = torch.full((wanted.stop - wanted.start,), math.nan, dtype=stored.dtype)
            for there, here, common in shared:
                source = _part(stored, *there, common)
                _part(out, *here, common).copy_(source)
                num_found += source.numel()
        num_wanted = wanted.stop - wanted.start
        has_gaps = out is None or bool(out.isnan().any())
        twice = num_found > num_wanted or (num_found == num_wanted and has_gaps)
        if out is None or num_found != num_wanted or twice:
            raise unusable(
                self.checkpoint.folder,
                f"{self.checkpoint.folder} has {num_found:,} of the {num_wanted:,} numbers "
                f"that this rank needs of {model}.{kind}.{name}" + ", some of them twice" * twice,
            )
        return out

    def _stored(self, file: str, key: str, held: FlatSlice) -> Tensor:
        path = self.checkpoint.folder / file
        try:
            tensor = self.files[file].get_tensor(key)
        except Exception as error:  # SafetensorError for an unknown name
            raise unusable(self.checkpoint.folder, f"{path} has no tensor {key} ({error})") from None
        if tensor.shape != (held.stop - held.start,) or not tensor.is_floating_point():
            wanted = f"[{held.stop - held.start}]"
            raise unusable(
                self.checkpoint.folder, f"{path}: {key} has the shape {list(tensor.shape)}, not {wanted} as placed"
            )
        return tensor


def _shared(one: FlatSlice, other: FlatSlice) -> Iterator[tuple[tuple[Box2, int], tuple[Box2, int], Box2]]:
    """Yields pairs of rectangles of two slices (see FlatSlice.rectangles) that overlap, with the overlap."""
    for mine in one.rectangles():
        for theirs in other.rectangles():
            common = overlap(((0, 1), *mine[0]), ((0, 1), *theirs[0]))
            if common is not None:
                yield mine, theirs, common[1:]


def _part(flat: Tensor, rectangle: Box2, before: int, part: Box2) -> Tensor:
    """Returns a part of a rectangle of a slice, as a matrix that shares the slice's memory."""
    (top, bottom), (left, right) = rectangle
    (r0, r1), (c0, c1) = part
    whole = flat[before : before + (bottom - top) * (right - left)].view(bottom - top, right - left)
    return whole[r0 - top : r1 - top, c0 - left : c1 - left]


def restore(models: RankModels, checkpoint: Checkpoint) -> None:
    """Loads a checkpoint into the engines of all ranks, which must not have stepped yet, and into all copies of their
    models. Collective; raises UserError on all ranks."""
    world = models.world
    with world.together("checking the checkpoint"):
        checkpoint.verify(sorted(checkpoint.files)[world.rank :: world.size])  # each file once
    with world.together("reading the checkpoint"):
        shapes = {model: shape for model, shape in models.program.workload.models.items() if shape is not None}
        reader = Reader(checkpoint, shapes)
        for model, engine in models.engines.items():
            if model not in reader.steps:
                raise unusable(checkpoint.folder, f"{checkpoint.folder} holds nothing of the {model}")
            boxes = boxes_of(shapes[model], _train_shard(models, model))

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
