"""Any layout per call: placements on up to eight ranks against a run of the same config on one.

    python tests/run_mpi.py 8 -- tests/mpi/test_layouts.py

Tensor, pipeline and data parallelism, ZeRO, offloading, recomputation, budgets of tokens, shared and separate ranks:
the same tokens; losses, norms and weights within 1e-5 * max(1, |value|) over three iterations.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_spmd.config.options import make_workload
from rlhf_spmd.model.parallel import slice_of
from rlhf_spmd.pages.option_tree import with_value
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.workload import Workload
from rlhf_spmd.runtime.engines import flat_engine
from rlhf_spmd.runtime.execute import parity_gate
from rlhf_spmd.runtime.weights import rank_models
from rlhf_spmd.runtime.weights.weight_sync import whole_state
from rlhf_spmd.strategies import flattening, separation
from tests.folders import write_model, write_prompts
from tests.mpi.test_invariance import (
    EOS_IDS,
    TOLERANCE,
    compare_metrics,
    load_run,
    save_run,
    weight_error,
    weights_of,
    with_groups,
)
from tests.programs import errors
from tests.run_mpi import NUM_RANKS
from tests.runs import RunOf, compiled, load
from tests.trainee import whole_gradients

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.usefixtures("cheap_garbage_collection"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]


def grid(ranks, **options) -> Layout:
    return Layout.grid_of(ranks, **options)


def everywhere(num: int, *, frozen: dict | None = None, **options):
    """Returns one layout for all calls of all models; `frozen` changes that of reference and reward."""

    def place(workload: Workload, cluster: Cluster) -> Placement:
        trained = grid(range(num), **options)
        inferred = {k: v for k, v in options.items() if k not in ("zero", "recompute")}
        layouts = {}
        for call in workload.workflow.placed_calls:
            if call.model in ("reference", "reward"):
                layouts[call.name] = grid(range(num), **(inferred | (frozen or {})))
            elif call.kind == "train":
                layouts[call.name] = trained
            elif call.kind == "generate":
                layouts[call.name] = grid(range(num), **({k: v for k, v in inferred.items() if k != "pp"}))
            else:
                layouts[call.name] = grid(range(num), **(inferred | {"zero": options.get("zero", 0)}))
        return Placement(layouts)

    return num, place


def by_kind(num: int, *, generate: Layout, train: Layout, infer: Layout | None = None, critic: Layout | None = None):
    """Returns generation, training and inference each in a layout."""

    def place(workload: Workload, cluster: Cluster) -> Placement:
        layouts = {}
        for call in workload.workflow.placed_calls:
            if call.kind == "train":
                layouts[call.name] = critic if critic and call.model == "critic" else train
            else:
                layouts[call.name] = generate if call.kind == "generate" else infer or generate
        return Placement(layouts)

    return num, place


MOST_RANKS = 8
A = range(MOST_RANKS)
PLACEMENTS = {
    "tp2": everywhere(2, tp=2),
    "pp2": everywhere(2, pp=2),
    "dp2 tp2": everywhere(4, tp=2),
    "tp4": everywhere(4, tp=4),
    "tp3": everywhere(3, tp=3),
    "pp2 tp2": everywhere(4, pp=2, tp=2),
    "dp2 pp2 tp2": everywhere(8, pp=2, tp=2),
    "dp2 pp4": everywhere(8, pp=4),
    "dp2 tp4": everywhere(8, tp=4),
    "dp2 tp2 zero 1": everywhere(4, tp=2, zero=1),
    "dp2 tp2 zero 2": everywhere(4, tp=2, zero=2, frozen={"zero": 0}),
    "dp2 tp2 zero 3": everywhere(4, tp=2, zero=3, frozen={"zero": 3}),
    "dp2 pp2 tp2 zero 1 recompute": everywhere(8, pp=2, tp=2, zero=1, recompute=True),
    "offload": everywhere(4, tp=2, frozen={"offload": True}),
    "budget": everywhere(4, pp=2, tokens=40),
    "budget dp": everywhere(2, tokens=33, recompute=True),
    "reallocation": by_kind(8, generate=grid(A, tp=1), train=grid(A, pp=2, tp=2), infer=grid(A, tp=2)),
    "reallocation tp4 to tp2": by_kind(4, generate=grid(range(4), tp=4), train=grid(range(4), tp=2, zero=1)),
    "reallocation zero 3": by_kind(8, generate=grid(A, tp=2), train=grid(A, zero=3)),
    "3 + 5": by_kind(8, generate=grid(range(3, 8)), train=grid(range(3), tp=3)),
    "5 + 3": by_kind(8, generate=grid(range(5, 8), tp=3), train=grid(range(5), zero=2)),
    "apart": by_kind(8, generate=grid(range(4, 8), tp=2), train=grid(range(4), pp=2, tp=2), critic=grid(range(4))),
    "apart zero 3": by_kind(4, generate=grid(range(2, 4), tp=2), train=grid(range(2), zero=3)),
    "separation in stages": (8, partial(separation.place, generation_tp=2, training_tp=2, training_pp=2, tokens=50)),
    "generation in stages": by_kind(
        4, generate=grid(range(4), pp=2, tp=2), train=grid(range(4), tp=4), infer=grid(range(4), pp=4)
    ),
    "other partners": by_kind(4, generate=Layout((0, 3, 1, 2), dp=2, tp=2), train=grid(range(4), tp=2)),
    "other stages": by_kind(4, generate=Layout((0, 3, 1, 2), dp=2, pp=2), train=grid(range(4), pp=2)),
    "zero 3 recompute": everywhere(4, zero=3, recompute=True, tokens=40, frozen={"zero": 0}),
    "odd ranks": by_kind(5, generate=grid((4, 1, 3, 0)), train=grid(range(5), pp=5), infer=grid((1, 2, 4), tp=3)),
    "flattening in slices": (8, partial(flattening.place, zero=3, tp=2, recompute=True)),
}
CONFIGS = {
    "plain": [],
    "7 rows": [
        "rollout_batch=14",
        "mini_batch=7",
        "ppo.old_logprobs=recompute",
        "ppo.truncation=bootstrap",
        "ppo.whiten=batch",
        "ppo.normalize_scores=true",
        "generation.temperature=0.8",
    ],
    "3 rows": [
        "rollout_batch=9",
        "mini_batch=3",
        "generation.top_k=15",
        "generation.min_new_tokens=2",
        "ppo.kl_early_stop=0.003",
        "optimizer.max_grad_norm=0.5",
    ],
}
CASES = [(name, ("plain", "7 rows", "3 rows")[index % 3]) for index, name in enumerate(PLACEMENTS)]
CASES += [("dp2 pp2 tp2", "7 rows"), ("reallocation", "3 rows"), ("apart", "3 rows")]
# In `make test` a placement that is not in SLOW runs in one of two tests: a whole run if there are no gradients of it
# in float64 or it is one of these, else the gradients of the first step. `make test-slow` has the other test of each.
WHOLE_RUNS = [
    ("budget", "3 rows"),
    ("reallocation", "7 rows"),
    ("apart", "plain"),
]
SLOW = {  # only in `make test-slow`: others find the same mistakes
    ("dp2 pp2 tp2", "plain"),
    ("dp2 tp2 zero 3", "3 rows"),
    ("separation in stages", "3 rows"),
    ("5 + 3", "3 rows"),
    ("dp2 pp4", "7 rows"),
    ("dp2 tp4", "3 rows"),
    ("reallocation zero 3", "plain"),
    ("zero 3 recompute", "plain"),
    ("apart zero 3", "7 rows"),
    ("flattening in slices", "3 rows"),
    ("dp2 pp2 tp2", "7 rows"),
    ("reallocation", "3 rows"),
    ("apart", "3 rows"),
    ("tp4", "plain"),
    ("other partners", "7 rows"),
    ("offload", "7 rows"),
}


def smallest(placement: str) -> int:
    """Returns the number of ranks of the smallest launch that has enough of them."""
    return min(size for size in NUM_RANKS if size >= PLACEMENTS[placement][0])


def has_float64(placement: str) -> bool:
    """Returns whether a placement supports float64: DeepSpeed's stages do not."""
    layouts = PLACEMENTS[placement][1](make_workload(load([])), Cluster.parse(f"1x{smallest(placement)}")).layouts
    return all(layout.zero < 2 for layout in layouts.values())


def cases(*, gradients: bool) -> list:
    found = []
    for placement, config in CASES:
        in_float64 = has_float64(placement)
        if gradients and not in_float64:
            continue
        sizes = [smallest(placement)] if gradients else sorted({smallest(placement), MOST_RANKS})
        marks = [pytest.mark.ranks(*sizes)]
        if gradients == (not in_float64 or (placement, config) in WHOLE_RUNS) or (placement, config) in SLOW:
            marks.append(pytest.mark.slow)
        elif len(sizes) > 1:
            marks.append(pytest.mark.slow_at(MOST_RANKS))
        found.append(pytest.param(placement, config, marks=marks, id=f"{placement}-{config}"))
    return found


def write_models(folder: Path) -> None:
    """Writes actor (with tied embeddings), reward model and prompts."""
    sizes = {"num_layers": 5, "num_heads": 8, "num_kv_heads": 4}
    write_model(folder / "actor", seed=1, eos_token_ids=EOS_IDS, tie_embeddings=True, **sizes)
    write_model(folder / "reward", head="scalar", seed=2, **sizes)
    write_prompts(folder / "prompts.jsonl")


@pytest.fixture(scope="module")
def folder(written):
    """Returns checkpoints with enough heads and layers for the largest grids."""
    return written(write_models)


def settings_of(folder: Path, config: str):
    return load(
        [
            f"models.actor={folder / 'actor'}",
            f"models.reward={folder / 'reward'}",
            f"data.prompts={folder / 'prompts.jsonl'}",
            "data.max_prompt=8",
            "generation.max_new_tokens=6",
            "iterations=2",
            "rollout_batch=16",
            "mini_batch=8",
            "micro_batch=2",
            "optimizer.actor_lr=1e-3",
            "optimizer.critic_lr=1e-3",
            *CONFIGS[config],
        ]
    )


@pytest.fixture(scope="module")
def alone(folder, made_once):
    """Returns, by config, metrics and weights of the run on one rank."""

    def make(config: str, path: Path) -> None:
        run = RunOf(settings_of(folder, config))
        save_run(path, run.iterations(), weights_of(run))

    runs = made_once(list(CONFIGS), make)
    return {config: load_run(runs / config) for config in CONFIGS}


@pytest.mark.parametrize(("placement", "config"), cases(gradients=False))
def test_equals_the_run_on_one_rank(placement, config, world, folder, alone, make_group):
    num_ranks, place = PLACEMENTS[placement]
    settings = settings_of(folder, config)
    program = compiled(settings, world.size, place)
    assert errors(program) == []
    run = RunOf(settings, with_groups(world, program, make_group), program)
    history = run.iterations()
    expected_history, expected_weights = alone[config]

    worst_metric = compare_metrics(history, expected_history)
    for metrics in history:
        assert metrics["parity_max_abs"] < 1e-4
        assert metrics["moved_bytes"] == sum(transfer.num_bytes for transfer in program.transfers)
        assert metrics["moved_messages"] == sum(transfer.num_messages for transfer in program.transfers)

    worst_weight = 0.0
    for model in ("actor", "critic"):
        train = program.workload.workflow.train_call(model)
        if world.rank in program.placement.layouts[train.name].ranks:
            state = whole_state(run.job.models, train)
            found = {f"{model}.{name}": weight for name, weight in (state or {}).items()}
            worst_weight = max(worst_weight, weight_error(found, expected_weights))
    worst = world.allgather([worst_metric, worst_weight], "differences")
    numbers = [max(column) for column in zip(*worst, strict=True)]
    if world.rank == 0:
        print(f"N {world.size} {placement}, {config}: metrics {numbers[0]:.1e}, weights {numbers[1]:.1e}")
    assert numbers[1] <= TOLERANCE


# ---- gradients in float64, before the optimizer -------------------------------------------------------------------


def first_gradients(settings, world, place, num_ranks: int, monkeypatch) -> tuple[dict, RunOf]:
    """Runs one mini-batch in float64. Returns by model this rank's part of the summed gradient, by parameter, and the
    norm of the whole."""
    settings = replace(with_value(settings, "ppo.epochs", 1), rollout_batch=settings.mini_batch)
    monkeypatch.setitem(rank_models.DTYPES, "float64", torch.float64)
    monkeypatch.setitem(parity_gate.PARITY_TOLERANCE, "float64", 1e-4)
    found, real = {}, flat_engine.FlatEngine._norm

    def noted(engine):
        gradients = whole_gradients(engine)
        norm = real(engine)
        found.setdefault(id(engine), (gradients, norm))
        return norm

    monkeypatch.setattr(flat_engine.FlatEngine, "_norm", noted)
    workload, cluster = replace(make_workload(settings), param_bytes=8), Cluster.parse(f"1x{num_ranks}")
    program = compile_program(workload, place(workload, cluster), cluster)
    run = RunOf(replace(settings, dtype="float64"), world(program), program)
    run.iteration()
    return {model: found[id(engine)] for model, engine in run.job.models.engines.items()}, run


@pytest.fixture(scope="module")
def gradients_alone(folder, made_once):
    """Returns, by config and model.parameter, the first gradient on one rank."""

    def make(name: str, path: Path) -> None:
        settings = settings_of(folder, name.removesuffix(" gradients"))
        with pytest.MonkeyPatch.context() as monkeypatch:
            found, _ = first_gradients(settings, lambda program: None, flattening.place, 1, monkeypatch)
        save_file({f"{model}.{n}": g for model, (gradients, _) in found.items() for n, g in gradients.items()}, path)

    runs = made_once([f"{config} gradients" for config in CONFIGS], make)
    return {config: load_file(runs / f"{config} gradients") for config in CONFIGS}


@pytest.mark.parametrize(("placement", "config"), cases(gradients=True))
def test_gradients_in_float64(placement, config, world, folder, gradients_alone, make_group, monkeypatch):
    _, place = PLACEMENTS[placement]
    settings, expected = settings_of(folder, config), gradients_alone[config]
    found, run = first_gradients(settings, lambda p: with_groups(world, p, make_group), place, world.size, monkeypatch)
    for model, (gradients, norm) in found.items():
        whole = [gradient.flatten() for name, gradient in expected.items() if name.startswith(f"{model}.")]
        assert norm == pytest.approx(torch.cat(whole).norm().item(), rel=1e-10)
        trained = run.job.models.engines[model].model
        for name, gradient in gradients.items():
            whole = expected[f"{model}.{name}"]
            torch.testing.assert_close(
                gradient, whole[slice_of(name, trained.config, trained.parallel.shard)], rtol=1e-10, atol=1e-10
            )
