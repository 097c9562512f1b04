"""Exact resume, inside one launch: a run is saved, made anew, restored and goes on, beside one that was left alone.

    python tests/run_mpi.py 4 -- tests/mpi/test_restore.py

In the same layout every bit is the same, at every ZeRO stage, with slices, stages and copies elsewhere. In another one
tokens are the same and numbers agree within 1e-5. `-m slow` has most cases.
"""

import json
import math
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from rlhf_spmd.config import options as configs
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.runtime.checkpoint.checkpoint_files import newest
from rlhf_spmd.runtime.checkpoint.resume import read_state
from rlhf_spmd.runtime.checkpoint.saving import Saver
from rlhf_spmd.runtime.checkpoint.train_state import restore
from rlhf_spmd.runtime.run import recorded
from rlhf_spmd.runtime.weights.weight_sync import whole_state
from rlhf_spmd.strategies import flattening, interleaving1, reallocation, separation
from tests.mpi.test_invariance import TOLERANCE, compare_metrics, weight_error, with_groups
from tests.mpi.test_layouts import settings_of, write_models
from tests.runs import RunOf, compiled

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.ranks(4),
    pytest.mark.usefixtures("cheap_garbage_collection"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]


def on(ranks: range, *, zero: int = 0, **options):
    """Returns every call on some ranks only."""

    def place(workload, cluster):
        calls = workload.workflow.placed_calls
        trains = {call.name: call.kind == "train" for call in calls}
        return Placement({name: Layout.grid_of(ranks, zero=zero * trains[name], **options) for name in trains})

    return place


PLACEMENTS = {
    "flattening": flattening.place,
    "zero 1": partial(flattening.place, zero=1),
    "zero 2": partial(flattening.place, zero=2),
    "zero 3": partial(flattening.place, zero=3),
    "interleaving1": interleaving1.place,
    "separation": separation.place,
    "separation zero 1": partial(separation.place, zero=1, training_pp=1),
    "separation zero 3": partial(separation.place, zero=3),
    "reallocation": partial(reallocation.place, training_tp=2, training_pp=2),
    "reallocation zero 1": partial(reallocation.place, training_tp=2, zero=1),
    "reallocation zero 3": partial(reallocation.place, training_tp=2, zero=3),
    "one": on(range(1)),
    "three": on(range(3), zero=1),
    "three stages": on(range(3), pp=3),
    "last": on(range(1, 4), zero=1),
}
ALL_CHANGES = ["ppo.kl_controller=adaptive", "ppo.normalize_scores=true", "optimizer.warmup_steps=5"]
ALL_CHANGES += ["optimizer.schedule=cosine", "optimizer.weight_decay=0.1"]


@pytest.fixture(scope="module")
def folder(written):
    return written(write_models)


class Runs:
    """Runs of one config under any placement."""

    def __init__(self, world, folder: Path, make_group, *more: str):
        self.world, self.folder, self.make_group = world, folder, make_group
        small = ["rollout_batch=8", "mini_batch=4", "generation.max_new_tokens=6", "ppo.epochs=1"]
        self.settings = configs.overridden(settings_of(folder, "plain"), [*small, *ALL_CHANGES, *more])

    def make(self, placement: str) -> RunOf:
        program = compiled(self.settings, self.world.size, PLACEMENTS[placement])
        return RunOf(self.settings, with_groups(self.world, program, self.make_group), program)

    def save(self, run: RunOf) -> None:
        if self.world.rank == 0:
            shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        self.world.barrier("a clean folder")
        texts = {"config.json": "{}", "strategy.py": ""}
        saver = Saver(run.job, self.folder, texts)
        about = {"inputs": recorded.inputs(run.prepared), "surroundings": {}, "ahead": 0}
        saver.save(run.number, about | recorded.run_state(run.state))
        saver.finish()

    def resumed(self, placement: str) -> RunOf:
        run, checkpoint = self.make(placement), newest(self.folder / "checkpoints")
        restore(run.job.models, checkpoint)
        recorded.restore_state(run.job, checkpoint.iteration, read_state(checkpoint, run.config))
        run.number = checkpoint.iteration
        return run


def stored_numbers(folder: Path) -> int:
    """Returns how many numbers the newest checkpoint holds."""
    checkpoint, found = newest(folder / "checkpoints"), 0
    for name in checkpoint.tensor_files:
        with (checkpoint.folder / name).open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found += sum(math.prod(entry["shape"]) for key, entry in header.items() if key != "__metadata__")
    return found


def weights_of(run: RunOf) -> dict[str, torch.Tensor]:
    """Returns whole weights of actor and critic on the first rank that trains each."""
    found = {}
    for model in ("actor", "critic"):
        train = run.program.workload.workflow.train_call(model)
        if run.job.world.rank in run.program.placement.layouts[train.name].ranks:
            state = whole_state(run.job.models, train)
            found |= {f"{model}.{name}": weight for name, weight in (state or {}).items()}
    return found


MORE = pytest.mark.slow  # of the same
CASES = [
    ("separation zero 3", "float32"),
    ("reallocation zero 1", "bfloat16"),
    *(
        pytest.param(placement, dtype, marks=MORE)
        for placement, dtype in (
            ("interleaving1", "float32"),
            ("reallocation", "float32"),
            ("flattening", "float32"),
            ("last", "float32"),
            ("flattening", "bfloat16"),
            ("zero 2", "float32"),
            ("zero 2", "bfloat16"),
            ("zero 3", "float32"),
            ("zero 3", "bfloat16"),
            ("separation", "float32"),
            ("separation zero 1", "float32"),
            ("reallocation zero 1", "float32"),
            ("zero 1", "float32"),
            ("reallocation zero 3", "float32"),
        )
    ),
]


@pytest.mark.parametrize(("placement", "dtype"), CASES)
def test_every_bit_is_the_same(placement, dtype, world, folder, make_group):
    runs = Runs(world, folder, make_group, f"dtype={dtype}")
    undisturbed = runs.make(placement)
    undisturbed.iteration()
    runs.save(undisturbed)
    shapes = undisturbed.program.workload.models
    assert stored_numbers(folder) == 3 * sum(shapes[model].num_params for model in ("actor", "critic"))  # each once
    expected = undisturbed.iteration()
    resumed = runs.resumed(placement)
    found = resumed.iteration()
    for metrics in (found, expected):
        del metrics["generate_s"], metrics["gen_tokens_per_s"]
    assert found == expected
    assert resumed.state == undisturbed.state
    theirs = weights_of(undisturbed)
    for name, weight in weights_of(resumed).items():
        assert torch.equal(weight, theirs[name]), name


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("zero 2", "reallocation zero 3"),
        pytest.param("reallocation", "one", marks=MORE),
        pytest.param("flattening", "separation", marks=MORE),
        pytest.param("zero 3", "three", marks=MORE),
        pytest.param("one", "zero 2", marks=MORE),
        pytest.param("reallocation zero 1", "three stages", marks=MORE),
    ],
)
def test_another_layout_agrees(before, after, world, folder, make_group):
    """And so does another number of ranks: the rest of the world does nothing."""
    runs = Runs(world, folder, make_group)
    undisturbed = runs.make(before)
    undisturbed.iteration()
    runs.save(undisturbed)
    theirs = undisturbed.iteration()
    resumed = runs.resumed(after)
    mine = resumed.iteration()
    compare_metrics([mine], [theirs])
    found, wanted = weights_of(resumed), weights_of(undisturbed)
    assert weight_error({name: found[name] for name in found.keys() & wanted.keys()}, wanted) <= TOLERANCE
