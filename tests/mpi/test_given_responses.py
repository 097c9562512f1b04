"""Pages that learn from responses of the data set: every placement on N ranks against the run on one rank.

python tests/run_mpi.py 2 4 5 8 -- tests/mpi/test_given_responses.py
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor

from rlhf_spmd.config import options as configs
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import Config
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.evaluation import precompute_program
from rlhf_spmd.plan.workload import Workload
from rlhf_spmd.runtime.checkpoint.checkpoint_files import STATE, newest
from rlhf_spmd.runtime.checkpoint.saving import Saver
from rlhf_spmd.runtime.checkpoint.train_state import restore
from rlhf_spmd.runtime.engines.train_engine import TrainEngine
from rlhf_spmd.runtime.run import recorded
from rlhf_spmd.runtime.run.precompute import precompute
from rlhf_spmd.runtime.run.prepare import prepare
from rlhf_spmd.strategies import flattening
from tests.folders import given_rows, write_model
from tests.mpi.test_invariance import (
    TOLERANCE,
    compare_metrics,
    load_run,
    save_run,
    weight_error,
    with_groups,
    zero,
)
from tests.mpi.test_routes import MIXTURE
from tests.programs import errors
from tests.runs import OneRank, RunOf, compiled

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.usefixtures("cheap_garbage_collection"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]
PAGES = {  # of a page also with a budget of tokens, and with logprobs from a file
    "sft": ["sft.epochs=2"],
    "reward_model": ["reward_model.epochs=2", "reward_model.centering_coef=0.01", "reward_model.foresight_coef=0.1"],
    "dpo": ["dpo.epochs=2", "dpo.beta=0.5"],
    "sft budget": ["mini_batch_tokens=50"],
    "dpo budget": ["mini_batch_tokens=70", "dpo.beta=0.5"],
    "sft adapters": ["sft.epochs=2", "lora.rank=3", "lora.dropout=0.3"],
    "dpo adapters": ["dpo.beta=0.5", "lora.rank=3", "lora.dropout=0.3", "mini_batch_tokens=70"],
    "sft mixture": ["sft.epochs=2", "experts.balance_coef=0.5", "experts.z_coef=0.1"],
    "dpo mixture": ["dpo.beta=0.5", "experts.balance_coef=0.5"],
    "dpo file": ["dpo.epochs=2", "dpo.beta=0.5", "data.precomputed_logprobs=FOLDER/alone"],
}


def apart(workload: Workload, cluster: Cluster) -> Placement:
    """Returns training on the first ranks, all else on the last."""
    half = cluster.num_devices // 2
    calls = workload.workflow.placed_calls
    ranks = {"train": cluster.ranks[:half], "infer": cluster.ranks[half:]}
    return Placement({call.name: Layout.data_parallel(ranks[call.kind]) for call in calls})


def split(**sizes: int) -> Callable:
    """Returns training in one layout, inference in that of flattening."""

    def place(workload: Workload, cluster: Cluster) -> Placement:
        layouts = {"train": Layout.grid_of(cluster.ranks, **sizes), "infer": Layout.data_parallel(cluster.ranks)}
        return Placement({call.name: layouts[call.kind] for call in workload.workflow.placed_calls})

    return place


PLACEMENTS = {
    "flattening": flattening.place,
    "zero 2": zero(2),
    "zero 3": zero(3),
    "apart": apart,
    "tp": split(tp=2),
    "pp": split(pp=2),
    "packed, recomputed": split(tokens=40, recompute=True),
    "packed, zero 3": partial(flattening.place, zero=3, tokens=30),
}
EVEN = ("tp", "pp")  # numbers of ranks that 2 divides
FAST = {  # the other pages are slow there
    "flattening": ("sft", "reward_model", "sft mixture", "dpo file"),
    "zero 2": ("reward_model", "sft budget"),
    "zero 3": ("sft", "dpo", "dpo budget"),
    "apart": ("dpo", "dpo budget"),
    "tp": ("reward_model", "dpo", "dpo mixture", "sft adapters"),
    "pp": ("sft", "reward_model", "dpo budget", "dpo adapters"),
    "packed, recomputed": ("dpo", "sft budget", "sft mixture", "sft adapters"),
    "packed, zero 3": ("dpo",),
}
CASES = [
    pytest.param(page, placement, id=f"{page}-{placement}", marks=[] if page in FAST[placement] else pytest.mark.slow)
    for placement in PLACEMENTS
    for page in PAGES
    if not (page.endswith("adapters") and "zero 3" in placement)
    and not (page.endswith("mixture") and ("zero" in placement or placement == "pp"))
]


@pytest.fixture(scope="module")
def folder(world, shared_folder):
    if world.rank == 0:
        rows = [row | {"margin": 0.25 * (index % 3)} for index, row in enumerate(given_rows(24))]
        (shared_folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        for name, head, seed in (("actor", "lm", 1), ("reference", "lm", 3), ("reward", "scalar", 2)):
            write_model(shared_folder / name, head=head, seed=seed)
        write_model(shared_folder / "tied", tie_embeddings=True)
        write_model(shared_folder / "mixture", **MIXTURE)
        config = config_of("dpo", shared_folder)
        program = precompute_program(compiled(config), num_rows=config.rollout_batch)
        precompute(prepare(config, program, OneRank()).job, str(shared_folder / "alone"))
    world.barrier("the checkpoints")
    return shared_folder


def config_of(page: str, folder: Path) -> Config:
    algorithm = page.split()[0]
    main = "reward" if algorithm == "reward_model" else "actor"
    model = "mixture" if page.endswith("mixture") else main
    words = [f"data.prompts={folder / 'rows.jsonl'}", "data.max_prompt=8", "generation.max_new_tokens=10"]
    words += ["iterations=2", "rollout_batch=14", "mini_batch=7", "micro_batch=3", f"optimizer.{main}_lr=1e-3"]
    words += [word.replace("FOLDER", str(folder)) for word in PAGES[page]]
    words += [f"models.reference={folder / 'reference'}"] if algorithm == "dpo" else []
    return presets.load(None, words, str(folder / model), algorithm=algorithm)


def run_of(config: Config, *world) -> RunOf:
    """Returns a run in which every other token of a response is learned, if the page has marks."""
    run = RunOf(config, *world)
    for marks in (run.job.prompts.numbers[key] for key in [config.algorithm.assistant_tokens] if key):
        marks.items = marks.items.copy()
        marks.items[1::2] = 0
    return run


def weights_of(run: RunOf) -> dict[str, Tensor]:
    return {name: weight.contiguous() for name, weight in run.weights(run.config.main_role).items()}


@pytest.fixture(scope="module")
def alone(folder, made_once) -> dict[str, tuple[list[dict], dict[str, Tensor]]]:
    """Returns metrics and weights of the run on one rank, by page."""

    def make(page: str, path: Path) -> None:
        run = run_of(config_of(page, folder))
        save_run(path, run.iterations(), weights_of(run))

    runs = made_once(sorted(PAGES), make)
    return {page: load_run(runs / page) for page in PAGES}


@pytest.mark.parametrize("placement", ["tp", "pp", "zero 3", "apart"])
def test_logprobs_of_the_start_do_not_depend_on_the_ranks(placement, world, folder, make_group):
    if placement in EVEN and world.size % 2:
        placement = "flattening"
    config = config_of("dpo", folder)
    program = precompute_program(compiled(config, world.size, PLACEMENTS[placement]), num_rows=config.rollout_batch)
    assert errors(program) == []
    path = folder / f"logprobs of {placement}"
    precompute(prepare(config, program, with_groups(world, program, make_group)).job, str(path))
    if world.rank == 0:
        files = sorted((folder / "alone").rglob("*.safetensors"))
        assert len(files) > 1
        for file in files:
            expected, found = load_file(file), load_file(path / file.relative_to(folder / "alone"))
            assert found.keys() == expected.keys()
            for key, values in found.items():
                np.testing.assert_allclose(values, expected[key], rtol=TOLERANCE, atol=TOLERANCE)


def learned(run: RunOf, engine: TrainEngine) -> tuple[int, list[Tensor]]:
    """Returns all that an optimizer step changes: AdamW's step count, a copy of masters and moments, and the
    weights."""
    num_steps, slices = engine.optimizer_state()
    return num_steps, [x.clone() for kinds in slices.values() for x in kinds.values()] + [
        *run.weights("actor").values()
    ]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("placement", ["zero 1", "zero 2", "zero 3", "pp"])
def test_steps_without_a_row_move_nothing(placement, world, folder, make_group):
    """Of all rows in an iteration no token is learned; the first steps of all are such, and a checkpoint
    of this state is resumed to the bit. Embeddings are tied, and shared by the stages of a pipeline."""
    words = [f"models.actor={folder / 'tied'}", "optimizer.weight_decay=0.5", "optimizer.schedule=linear"]
    config = configs.overridden(config_of("sft", folder), [*words, "iterations=3"])
    program = compiled(config, world.size, {**PLACEMENTS, "zero 1": zero(1)}[placement])

    def begin() -> tuple[RunOf, TrainEngine]:
        run = RunOf(config, with_groups(world, program, make_group), program)
        return run, run.job.models.engines["actor"]

    run, engine = begin()
    marks, before = run.job.prompts.numbers[config.algorithm.assistant_tokens], learned(run, engine)
    items = marks.items
    for number, num_steps in enumerate((0, 4, 4)):
        marks.items = items * (number % 2)
        metrics, now = run.iteration(), learned(run, engine)
        assert now[0] == num_steps and run.state.steps == {"actor": 4 * (number + 1)}
        same = [*map(torch.equal, now[1], before[1])]
        assert not any(same) if number % 2 else all(same)
        assert (metrics["actor_grad_norm"] > 0) == (number % 2) and metrics["actor_lr"] > 0
        before = now
        if number == 0:  # a checkpoint without a single step of the optimizer
            if world.rank == 0:
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            world.barrier("a clean folder")
            texts = {"config.json": "{}", "strategy.py": ""}
            saver = Saver(run.job, folder, texts)
            saver.save(run.number, {})
            saver.finish()
            resumed, its_engine = begin()
            restore(resumed.job.models, newest(folder / "checkpoints"))
            found = learned(resumed, its_engine)
            assert found[0] == now[0] and all(map(torch.equal, found[1], now[1]))


@pytest.mark.ranks(2)
def test_a_resumed_run_has_the_same_dropout(world, folder, make_group):
    """Every bit of the adapters of the next iteration, whose masks no iteration before had."""
    config = config_of("sft adapters", folder)
    program = compiled(config, world.size, PLACEMENTS["flattening"])

    def begin() -> RunOf:
        return run_of(config, with_groups(world, program, make_group), program)

    run = begin()
    run.iteration()
    if world.rank == 0:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    world.barrier("a clean folder")
    saver = Saver(run.job, folder, {"config.json": "{}", "strategy.py": ""})
    saver.save(run.number, recorded.run_state(run.state))
    saver.finish()
    resumed, checkpoint = begin(), newest(folder / "checkpoints")
    restore(resumed.job.models, checkpoint)
    resumed.number = checkpoint.iteration
    recorded.restore_state(resumed.job, checkpoint.iteration, json.loads(checkpoint.text(STATE)))
    expected, found = run.iteration(), resumed.iteration()
    assert found["loss"] == expected["loss"]
    assert all(weight.equal(weights_of(run)[name]) for name, weight in weights_of(resumed).items())


@pytest.mark.rotates
@pytest.mark.parametrize(("page", "placement"), CASES)
def test_equals_the_run_on_one_rank(page, placement, world, folder, alone, make_group):
    if placement in EVEN and world.size % 2:
        placement = "flattening"
    config = config_of(page, folder)
    program = compiled(config, world.size, PLACEMENTS[placement])
    assert errors(program) == []
    run = run_of(config, with_groups(world, program, make_group), program)
    history = run.iterations()
    expected_history, expected_weights = alone[page]
    compare_metrics(history, expected_history)
    assert history[0]["loss"] != history[1]["loss"]
    assert placement == "tp" or weight_error(weights_of(run), expected_weights) <= TOLERANCE  # tp: a rank has slices
