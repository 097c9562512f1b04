"""The profile verb on one rank: what it measures comes back from its file, and forecasts are made of it."""

import dataclasses
import os
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from tqdm import tqdm

from rlhf_spmd import embedded
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.machines.calibration_file import read_calibration, write_calibration
from rlhf_spmd.pages.algorithm import algorithm_names
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.runtime.profile import clock as clock_module
from rlhf_spmd.runtime.profile.clock import Clock
from rlhf_spmd.runtime.profile.measured_sizes import Grid, rows_up_to
from rlhf_spmd.runtime.profile.model_timings import TimedModel
from rlhf_spmd.runtime.profile.profile import between_ranks, groups_of, inside_ranks, profile, summary
from rlhf_spmd.runtime.world.world import World

TOY = Grid(max_prompt=4, max_response=4, shares=(1.0,), most_rows=2, most_places=2, tps=(1,))


@pytest.fixture
def world() -> Iterator[World]:
    """The world of a program that was started without mpirun."""
    world = World.discover()
    world.use_device("auto")
    yield world
    world.shutdown()


@dataclasses.dataclass
class Nodes:
    """Where ranks are."""

    nodes: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.nodes)

    @property
    def num_nodes(self) -> int:
        return len(set(self.nodes))


def test_groups_are_inside_a_node_or_between_nodes():
    nodes = Nodes((0,) * 6 + (1,) * 6)
    assert inside_ranks(nodes) == [(0, 1), (0, 1, 2, 3), (0, 1, 2, 3, 4, 5)]
    assert between_ranks(nodes) == [(0, 6)]
    named = groups_of(nodes, (1, 2))
    assert named["ranks 0-5"] == (0, 1, 2, 3, 4, 5) and named["ranks 10-11"] == (10, 11)
    assert inside_ranks(Nodes((0,))) == between_ranks(Nodes((0, 0))) == []


def test_the_grid_holds_what_calls_may_meet():
    workload = make_workload(presets.load("tiny"))
    grid = Grid.of(workload, 4, 4)
    assert grid.tps == (1, 2)  # of two key-value heads
    assert Grid.of(workload, 3, 3).tps == (1,)
    assert rows_up_to(32) == (1, 4, 16, 32) and rows_up_to(1) == (1, 2) and rows_up_to(16) == (1, 4, 16)
    assert set(grid.rows(1.0, 9)) == {(32, 24)}
    rows = grid.rows(0.5, 100)
    for index, most in enumerate((32, 24)):
        column = [row[index] for row in rows]
        assert sum(column) / 100 == pytest.approx(most / 2, rel=0.02)
        assert min(column) >= most / 6 - 1 and max(column) <= most * 5 / 6 + 1
    assert len(set(rows)) > 50


@pytest.mark.timed
def test_a_clock_tells_processor_seconds_of_what_takes_turns():
    """Sleeping takes none, adding up does, and twice as much takes twice as long."""
    import time

    class Alone:
        def allgather(self, value, what):
            return [value]

    order = []
    works = [lambda: time.sleep(0.02), lambda: sum(range(300_000)), lambda: order.append(len(order))]
    clock = Clock(Alone(), 1, lambda: None, lambda: None, tqdm(disable=True), budget_s=0.2)
    slept_s, added_s, _ = clock.seconds(*works)
    assert slept_s < 0.01 and added_s > 2e-4 and len(order) >= 4
    wall_s, _, _ = dataclasses.replace(clock, num_workers=None).seconds(*works)
    assert wall_s >= 0.02


@dataclasses.dataclass
class PlantedTime:
    """Stands in for the module `time`: works advance it by the seconds that they are said to take."""

    elapsed_s: float = 0.0
    processor_s: float = 0.0

    def perf_counter(self) -> float:
        return self.elapsed_s

    def process_time(self) -> float:
        return self.processor_s

    def sleep(self, seconds: float) -> None:
        self.elapsed_s += seconds

    def compute(self, seconds: float) -> None:
        self.elapsed_s += seconds
        self.processor_s += seconds


def test_a_clock_adds_idle_time_where_ranks_wait_for_each_other(monkeypatch):
    """Two ranks on one processor: half of the seconds by the clock, in proportion to what each work computes."""

    class Alone:
        def allgather(self, value, what):
            return [value]

    planted = PlantedTime()
    monkeypatch.setattr(clock_module, "time", planted)
    works = [lambda: planted.sleep(0.02), lambda: planted.compute(0.001), lambda: planted.compute(0.003)]
    clock = Clock(Alone(), 1, lambda: None, lambda: None, tqdm(disable=True), budget_s=0.2)
    # 24 ms by the clock, half of them for this rank: 4 ms are computed, 8 ms idle, of which a quarter goes to the first
    assert clock.seconds(*works, together=2) == pytest.approx((0.0, 0.001 + 0.002, 0.003 + 0.006))
    assert clock.seconds(*works) == pytest.approx((0.0, 0.001, 0.003))  # alone: processor seconds
    by_elapsed = dataclasses.replace(clock, num_workers=None)
    assert by_elapsed.seconds(*works, together=2) == pytest.approx((0.02, 0.001, 0.003))


def test_what_an_engine_captures_is_not_timed():
    """CUDA graphs are captured with the first step of an engine: one engine serves all timings of as many rows, and its
    cache has gone when training is measured."""
    config = presets.load("tiny")
    workload, world = make_workload(config), SimpleNamespace(rank=0, size=1, device=torch.device("cpu"))
    shape = next(shape for shape in workload.models.values() if not shape.scalar_head)
    subject = TimedModel(world, config, workload, TOY, shape, 1, 1)
    caches = []
    for num_rows, num_tokens in ((2, 4), (2, 1), (2, 3), (1, 4)):
        subject.generate(subject.tokens([4] * num_rows), [num_tokens] * num_rows)
        assert subject.generating.is_idle and not subject.generating.requests.prompts
        caches.append(weakref.ref(subject.generating.cache))
    assert caches[0]() is None and caches[0] == caches[1] == caches[2] and caches[3]() is not None
    subject.engine()
    assert caches[3]() is None


@pytest.mark.parametrize("algorithm", algorithm_names())
def test_a_training_step_of_every_page_is_timed(algorithm):
    """Also of one whose loss is divided by the sum of a column."""
    words = [f"models.teacher={embedded.path_of('tiny/actor')}"] if algorithm == "distill" else []
    config = presets.load("tiny", words, algorithm=algorithm)
    workload, world = make_workload(config), SimpleNamespace(rank=0, size=1, device=torch.device("cpu"))
    model = next(iter(workload.workflow.trained_models))
    subject = TimedModel(world, config, workload, TOY, workload.models[model], 1, 1)
    engine, rows = subject.engine(), subject.rows([(4, 4), (4, 2)])
    subject.train(engine, rows)  # it raises if no row counts
    subject.train(engine, rows, update=True)


def test_a_profile_becomes_forecasts(world, tmp_path, capfd):
    config = presets.load("tiny")
    found = profile(world, config, name="mine", grid=TOY, budget_s=0.0)
    assert "profile" in capfd.readouterr().err  # the bar
    path = tmp_path / "mine.json"
    write_calibration(found, str(path))
    read = read_calibration(str(path))
    workers = max(1, len(os.sched_getaffinity(0)) // torch.get_num_threads())
    assert read.devices["cpu"].num_workers == workers and "tiny" in read.provenance
    tables = {one.shape.scalar_head: one for one in read.devices["cpu"].measured}
    assert set(tables) == {False, True} and tables[False].decode and not tables[True].decode
    assert tables[False].forward.lengths == (8.0,) and tables[False].decode.layer.amounts == (1.0, 2.0)
    assert "lm head, tp 1" in summary(read)
    program = load_strategy("flattening").compile(make_workload(config), Cluster.parse("1x2"), {})
    assert forecast(program, read).makespan_s > 0
