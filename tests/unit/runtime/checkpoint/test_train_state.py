"""Masters and moments as runs of numbers: whatever layout wrote them, any other finds what it needs, and no more."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.plan.workload import ModelShape
from rlhf_spmd.runtime.checkpoint import checkpoint_files
from rlhf_spmd.runtime.checkpoint.checkpoint_files import Checkpoint, rank_file
from rlhf_spmd.runtime.checkpoint.train_state import KINDS, FlatSlice, Reader, boxes_of, write_tensors

SHAPE = ModelShape(3, 6, 10, 4, 2, 3, 11, qkv_bias=True, tied=True)
GRIDS = some.tuples(some.integers(1, 4), some.integers(1, 3), some.integers(1, 2), some.booleans())  # dp, pp, tp, parts


def whole_model() -> dict[str, torch.Tensor]:
    """Makes a model in which every number of a kind of a parameter is another one."""
    found, first = {}, 0
    for name, ((_, rows), (_, columns)) in boxes_of(SHAPE, Shard()).items():
        for kind in KINDS:
            found[f"{kind}.{name}"] = torch.arange(first, first + rows * columns).view(rows, columns).float()
            first += rows * columns
    assert first < 2**24  # exact in float32
    return found


WHOLE = whole_model()


def shares(grid) -> list[tuple[Shard, dict[str, tuple[int, int]]]]:
    """Returns what the ranks of a layout update: of a row of all weights a part, or of each weight a part."""
    dp, pp, tp, by_weight = grid
    found = []
    for replica in range(dp):
        for stage in range(pp):
            for index in range(tp):
                shard = Shard(stage, pp, index, tp)
                sizes = {n: math.prod(b - a for a, b in box) for n, box in boxes_of(SHAPE, shard).items()}
                part, begin, mine = -(-sum(sizes.values()) // dp), 0, {}
                for name, size in sizes.items():
                    if by_weight:
                        step = -(-size // dp)
                        first, last = min(replica * step, size), min((replica + 1) * step, size)
                    else:
                        first, last = max(replica * part - begin, 0), min((replica + 1) * part - begin, size)
                    begin += size
                    if first < last:
                        mine[name] = first, last
                found.append((shard, mine))
    return found


def cut(kind: str, name: str, shard: Shard, part: tuple[int, int]) -> torch.Tensor:
    (r0, r1), (c0, c1) = boxes_of(SHAPE, shard)[name]
    return WHOLE[f"{kind}.{name}"][r0:r1, c0:c1].reshape(-1)[slice(*part)]


def write(folder: Path, grid, change=lambda places, tensors: None) -> Checkpoint:
    """Writes a checkpoint of the actor; with tp, slices that hold the same numbers write them all."""
    draft, files = checkpoint_files.make_draft(folder, 1), {}
    for rank, (shard, mine) in enumerate(shares(grid)):
        tensors = {f"actor.{k}.{n}": cut(k, n, shard, part).contiguous() for n, part in mine.items() for k in KINDS}
        boxes = boxes_of(SHAPE, shard)
        places = {name: [*boxes[name][0], *boxes[name][1], *part] for name, part in mine.items()}
        change(places, tensors)
        about = {"places": json.dumps({"actor": places}), "steps": json.dumps({"actor": 7})}
        files[rank_file(rank)] = write_tensors(draft / rank_file(rank), tensors, about)
    for name in ("state.json", "config.json", "strategy.py"):
        files[name] = checkpoint_files.write(draft / name, [b"{}"])
    return Checkpoint.read(checkpoint_files.commit(folder, 1, files))


@settings(max_examples=20, deadline=None)
@given(before=GRIDS.map(lambda grid: (grid[0], 1, 1, grid[3])), after=GRIDS)
def test_any_layout_reads_what_data_parallel_ranks_wrote(before, after, tmp_path_factory):
    roundtrip(before, after, tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("before", [(2, 1, 2, False), (3, 1, 2, True)])
def test_slices_are_read_by_others(before, tmp_path):
    """Of what every slice holds, one writes: here the first."""
    once = set()

    def first_only(places: dict, tensors: dict) -> None:
        for name in list(places):
            place = tuple(places[name])
            if (name, place) in once:
                del places[name]
            once.add((name, place))

    reader = Reader(write(tmp_path, before, first_only))
    for shard, mine in shares((2, 3, 1, False)):
        for name, part in mine.items():
            wanted = FlatSlice(boxes_of(SHAPE, shard)[name], *part)
            assert torch.equal(reader.read("actor", "exp_avg", name, wanted), cut("exp_avg", name, shard, part))


def roundtrip(before, after, folder: Path) -> None:
    found = write(folder, before)
    found.verify(found.files)
    reader = Reader(found)
    assert reader.steps == {"actor": 7}
    for shard, mine in shares(after):
        for name, part in mine.items():
            for kind in KINDS:
                numbers = reader.read("actor", kind, name, FlatSlice(boxes_of(SHAPE, shard)[name], *part))
                assert torch.equal(numbers, cut(kind, name, shard, part)), (kind, name)


NORM = "norm.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda places, tensors: places.pop(NORM), "actor.exp_avg.norm.weight can't be read (ValueError: numbers that"),
        (lambda places, tensors: places.update({NORM: [0, 6, 0, 1, 0, 5]}), "actor.exp_avg.norm.weight can't be read"),
        (lambda places, tensors: places.update({NORM: "here"}), "rank-0000.safetensors can't be read"),
        (lambda places, tensors: tensors.pop(f"actor.exp_avg.{NORM}"), "actor.exp_avg.norm.weight can't be read"),
    ],
)
def test_what_does_not_fit_is_refused(change, words, tmp_path):
    with pytest.raises(UserError) as error:
        reader = Reader(write(tmp_path, (1, 1, 1, False), change))
        reader.read("actor", "exp_avg", NORM, FlatSlice(((0, 6), (0, 1)), 0, 6))
    assert words in str(error.value) and "iteration-000001" in str(error.value)
    assert "start anew" in str(error.value)
