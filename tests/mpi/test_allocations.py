"""What interleaving saves, on real allocations: every tensor of this process is counted, before and after loading.

APP's claim (arXiv 2312.11819): reference and reward, replicated, take half of flattening's bytes. Sharded by ZeRO 3
they take the same bytes, but half as many ranks gather them.
"""

import gc
import time
from dataclasses import replace
from itertools import product

import pytest
import torch

from rlhf_spmd.plan.cost.memory import num_params, static_bytes, working_bytes
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.runtime.engines.flat_engine import FlatEngine
from rlhf_spmd.runtime.generation.engine import Engine
from rlhf_spmd.strategies import flattening, interleaving1, interleaving2, separation
from tests.folders import write_all
from tests.mpi.test_invariance import with_groups
from tests.mpi.test_routes import MIXTURE
from tests.runs import RunOf, compiled, load

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.usefixtures("cheap_garbage_collection"),  # whose modules tensor_bytes() need not go through either
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]
FROZEN = ("reference", "reward")


def tensor_bytes() -> int:
    """Returns bytes of all storages that some tensor of this process holds."""
    gc.collect()
    # type() and not isinstance(), which asks lazy modules for their class and so imports them
    storages = [t.untyped_storage() for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


@pytest.fixture(scope="module")
def settings(written):
    return load(written(write_all))


@pytest.fixture(scope="module")
def mixture(written):
    return load(written(lambda folder: write_all(folder / "mixture", **(MIXTURE | {"expert_size": 48}))))


def measured(place, settings, world, make_group, **options) -> tuple[int, RunOf]:
    """Returns bytes that the models of a run take on this rank."""
    program = compiled(settings, world.size, place, **options)
    before = tensor_bytes()
    run = RunOf(settings, with_groups(world, program, make_group), program)
    return tensor_bytes() - before, run


def frozen_weights(run: RunOf) -> list[torch.Tensor]:
    return [p for (name, _), model in run.job.models.copies.items() if name in FROZEN for p in model.parameters()]


@pytest.mark.rotates
@pytest.mark.parametrize("strategy", [interleaving1, interleaving2], ids=["interleaving1", "interleaving2"])
def test_replicated_reference_and_reward_take_half(strategy, settings, world, make_group):
    flat, run = measured(flattening.place, settings, world, make_group)
    copies = run.job.models.copies
    sizes = {name: sum(p.nbytes for p in copies[name, Shard()].parameters()) for name in FROZEN}
    del run, copies
    halved, run = measured(strategy.place, settings, world, make_group)
    mine = [name for name in FROZEN if (name, Shard()) in run.job.models.copies]
    assert len(mine) == 1  # each rank has one of the two
    saved = sum(sizes.values()) - sizes[mine[0]]
    assert abs(flat - halved - saved) <= 0.02 * saved
    total = sum(world.allgather(flat - halved, "the bytes"))
    if world.size % 2 == 0:  # equal halves: what all ranks save together is half of what they had
        assert abs(total - world.size * sum(sizes.values()) / 2) <= 0.02 * total
    forecast = static_bytes(run.program, world.rank)["weights"]
    trained = [p for engine in run.job.models.engines.values() for p in engine.model.parameters()]
    held = sum(p.nbytes for p in (*frozen_weights(run), *trained))
    assert abs(held - forecast) <= 0.02 * forecast


@pytest.mark.slow_at(2)
@pytest.mark.parametrize("zero", [*(pytest.param(zero, marks=pytest.mark.slow) for zero in (0, 1)), 2])
def test_gradients_and_caches_are_never_there_together(zero, settings, world, make_group, monkeypatch):
    """What a rank holds at the peak is the larger of the two, in bytes of tensors; and the gradients of one model."""
    program = compiled(settings, world.size, flattening.place, zero=zero)
    run = RunOf(settings, with_groups(world, program, make_group), program)
    run.iteration()
    run.data = None
    rest, held = tensor_bytes(), {"generate": [], "train": []}
    make, norm = Engine.run, FlatEngine._norm

    def generated(engine, *arguments):
        found = make(engine, *arguments)
        caches.append(engine.cache.keys_LnKsd.nbytes + engine.cache.values_LnKsd.nbytes)
        held["generate"].append(tensor_bytes() - rest)
        return found

    def normed(engine):
        # a thread of gloo lets go of a message's tensors soon after wait() has returned
        limit_s = time.monotonic() + 10
        while (found := tensor_bytes() - rest) >= bound() and time.monotonic() < limit_s:
            time.sleep(0.01)
        held["train"].append(found)
        return norm(engine)

    def bound() -> int:
        room = min(*caches, *call_gradients(program, world.rank))  # neither has so much beside the other
        return working["gradients"] + working["rows"] + room

    working, caches = working_bytes(program, world.rank), list[int]()
    monkeypatch.setattr(Engine, "run", generated)
    monkeypatch.setattr(FlatEngine, "_norm", normed)
    run.iteration()
    assert min(held["train"]) >= min(call_gradients(program, world.rank)) > 0 and min(held["generate"]) >= caches[0] > 0
    assert max(held["generate"]) - max(caches) < bound() - working["gradients"]
    assert max(held["train"]) < bound()


def call_gradients(program, rank: int) -> list[int]:
    """Returns the bytes of gradients between passes: of each model all, or of ZeRO 2 this rank's part."""
    found = []
    for call in program.workload.workflow.train_calls:
        layout, params = program.placement.layouts[call.name], num_params(program.workload.shape(call.model), Shard())
        found.append(4 * (params // layout.dp if layout.zero == 2 else params))
    return found


# ---- the forecast of every layout ---------------------------------------------------------------------------------


def everywhere(*, frozen: dict | None = None, **options):
    """Returns all models in one grid over all ranks, generation in whole copies where there are stages."""

    def place(workload, cluster):
        grid = {key: value for key, value in options.items() if key in ("pp", "tp")}
        layouts = {}
        for call in workload.workflow.placed_calls:
            if call.kind == "train":
                layouts[call.name] = Layout.grid_of(cluster.ranks, **options)
            elif call.kind == "generate":
                layouts[call.name] = Layout.grid_of(cluster.ranks, tp=options.get("tp", 1))
            else:
                more = frozen or {} if call.model in FROZEN else {}
                layouts[call.name] = Layout.grid_of(cluster.ranks, **grid, **more)
        return Placement(layouts)

    return place


GRIDS = {
    "dp": everywhere(),
    "dp zero 1": everywhere(zero=1),
    "dp zero 2": everywhere(zero=2),
    "dp zero 1 offload": everywhere(zero=1, offload=True),
    "dp zero 3": everywhere(zero=3, frozen={"zero": 3}),
    "tp2": everywhere(tp=2),
    "tp2 zero 1": everywhere(tp=2, zero=1),
    "pp2": everywhere(pp=2),
    "pp2 tp2 zero 1": everywhere(pp=2, tp=2, zero=1),
    "pp2 zero 2": everywhere(pp=2, zero=2),
    "offload": everywhere(tp=2, frozen={"offload": True}),
    "separation": separation.place,
    "separation tp2": lambda workload, cluster: separation.place(workload, cluster, generation_tp=2, training_tp=2),
}


# of the ranks
NEEDS = dict.fromkeys(("tp2", "tp2 zero 1", "pp2", "offload"), 2)
NEEDS |= dict.fromkeys(("pp2 tp2 zero 1", "pp2 zero 2", "separation tp2"), 4)


# grid -> its precision in `make test`; the others are parts of these
QUICK = {"dp zero 3": "bfloat16", "pp2 tp2 zero 1": "bfloat16", "separation tp2": "bfloat16", "separation": "float32"}
QUICK |= dict.fromkeys(("dp zero 2", "dp zero 1 offload", "tp2 zero 1", "offload"), "float32")


def static_cases() -> list:
    """Returns the cases: a grid that not every number of ranks makes runs at 4; the others rotate."""
    cases = []
    for grid, dtype in product(GRIDS, ("float32", "bfloat16")):
        marks = [pytest.mark.slow_at(2) if grid in NEEDS else pytest.mark.rotates]
        if dtype != QUICK.get(grid):
            marks.append(pytest.mark.slow)
        cases.append(pytest.param(grid, dtype, marks=marks))
    return cases


@pytest.mark.parametrize(("grid", "dtype"), static_cases())
def test_static_bytes_are_as_forecast(grid, dtype, settings, world, make_group):
    """Weights, gradients and optimizer state that this process really holds after an iteration, to 2%."""
    if world.size % NEEDS.get(grid, 1):
        pytest.skip("the ranks do not make this grid")
    check_static_bytes(grid, replace(settings, dtype=dtype, parity_tolerance=50.0), world, make_group)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "grid", ["tp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dp zero 1", "pp2"))]
)
def test_static_bytes_of_a_mixture_are_as_forecast(grid, mixture, world, make_group):
    """A router and the experts of each sparse layer, whole ones in slices; the first of three layers is dense."""
    check_static_bytes(grid, mixture, world, make_group)


def check_static_bytes(grid, settings, world, make_group) -> None:
    """Compares what a run holds after an iteration with its forecast."""
    before = tensor_bytes()
    program = compiled(settings, world.size, GRIDS[grid])
    run = RunOf(settings, with_groups(world, program, make_group), program)
    run.iteration()
    run.data = None
    held = tensor_bytes() - before
    if run.job.models.arena is not None:  # the buckets, which all ranks of the machine share
        held -= next(iter(run.job.models.arena.parts.values())).untyped_storage().nbytes()
    forecast = static_bytes(program, world.rank)
    print(f"{grid} {settings.dtype}: rank {world.rank} holds {held:,}, forecast {sum(forecast.values()):,}")
    assert abs(held - sum(forecast.values())) <= 0.02 * sum(forecast.values())
