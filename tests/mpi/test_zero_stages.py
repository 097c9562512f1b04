"""ZeRO stages that give the same bits: weights, norms and optimizer state after some steps, in buckets of any size,
with states on the device and in host memory.

python tests/run_mpi.py 4 -- tests/mpi/test_zero_stages.py
python tests/run_mpi.py --backend ordered 4 -- tests/mpi/test_zero_stages.py
"""

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.pages.option_tree import with_value
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.runtime.engines import flat_layout
from tests.mpi.test_allocations import everywhere
from tests.mpi.test_invariance import with_groups
from tests.mpi.test_layouts import settings_of, write_models
from tests.runs import RunOf, compiled
from tests.steps import engine_step
from tests.trainee import CLIP, Trainee, global_batch, noted_gradients, share_of_loss, tiny, whole_weights

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.ranks(4)]
STAGES = (0, 1, 2)
ONE, SEVERAL = 1 << 24, 1  # numbers of a bucket; 1: the smallest
LATE = {"weight_decay": 0.1, "sums_each_pass": False}


@dataclass
class After:
    """What some steps leave behind."""

    norms: list[float]
    weights: dict[str, Tensor]
    state: dict[tuple[str, int], float]  # masters and moments, by name and number

    @classmethod
    def of(cls, engine, norms: list[float]) -> "After":
        numbers = {}
        for (name, start, stop), kinds in engine.optimizer_state()[1].items():
            for kind, x in kinds.items():
                numbers |= zip(product((f"{kind} {name}",), range(start, stop)), x.tolist(), strict=True)
        return cls(norms, whole_weights(engine), numbers)

    def assert_equal(self, other: "After", *, state: bool = True) -> None:
        assert self.norms == other.norms
        assert self.weights.keys() == other.weights.keys()
        assert [name for name, weight in self.weights.items() if not torch.equal(weight, other.weights[name])] == []
        assert self.state == other.state or not state


def two_nodes(job) -> tuple[dist.ProcessGroup, ...]:
    """Returns the groups in which a rank sums gradients where four ranks are on two nodes."""
    layout, node_of = Layout.data_parallel(range(4)), Cluster.parse("2x2", "cpu").node_of
    made = {ranks: job.make_group(ranks) for rank in layout.ranks for ranks in layout.sum_ranks(rank, node_of)}
    return tuple(made[ranks] for ranks in layout.sum_ranks(job.world.rank, node_of))


def test_sums_of_two_nodes(job, monkeypatch):
    """On each node first, then those of the nodes: the bits of plain sums in this order."""
    monkeypatch.setattr(flat_layout, "BUCKET_NUMEL", SEVERAL)
    noted, batch = noted_gradients(monkeypatch), global_batch(job.world.rank)
    for stage in STAGES:
        trainee = Trainee(job, "all", stage, clip=None, sums=two_nodes(job))
        engine_step(trainee.engine, [batch], share_of_loss, lr=0.0)
    model = tiny()
    share_of_loss(model, batch).backward()
    own = torch.cat([p.grad.flatten() for p in model.parameters()])
    of_rank = [torch.empty_like(own) for _ in range(4)]
    dist.all_gather(of_rank, own, group=trainee.group)
    first, second, third, fourth = of_rank
    expected = (first + second) + (third + fourth)
    assert len(noted) == len(STAGES) and all(torch.equal(found, expected) for found in noted)
    assert not torch.equal(expected, first + second + third + fourth)  # the order makes a difference


@pytest.mark.parametrize(
    ("group", "num_micro", "dtype"),
    [
        ("all", 3, torch.float32),
        ("first half", 1, torch.bfloat16),
        ("two nodes", 1, torch.float32),
        ("two nodes", 3, torch.bfloat16),
    ],
    ids=str,
)
def test_stages_and_buckets(job, group, num_micro, dtype, monkeypatch):
    """Uneven data, one rank without any, clipping active."""
    more, found = dict(LATE), {}
    if group == "two nodes":
        group, more["sums"] = "all", two_nodes(job)
    for size in (SEVERAL, ONE):
        monkeypatch.setattr(flat_layout, "BUCKET_NUMEL", size)
        for stage, offload in product(STAGES, (False, True) if size == SEVERAL else (False,)):
            options = more | {"dtype": dtype, "offload": offload}
            trainee = Trainee(job, group, stage, clip=CLIP, num_micro=num_micro, **options)
            for step in range(3):
                trainee.step(step)
            if trainee.inside:
                assert min(trainee.run.norms) > CLIP
                assert (len(trainee.engine._layout.buckets) > 3) == (size == SEVERAL)
                assert trainee.engine._gradient is None and not any(
                    p.grad is not None for p in trainee.engine.model.parameters()
                )
                found[size, stage, offload] = After.of(trainee.engine, trainee.run.norms)
    for (size, *_), after in found.items():
        after.assert_equal(found[size, 0, False])


GRIDS = {  # of 4 ranks: options of the layout, then of the run
    "dp4 on 2 nodes": ({}, {}),
    "dp2 tp2": ({"tp": 2}, {"dtype": "bfloat16"}),
    "dp2 tp2 recompute": ({"tp": 2, "recompute": True}, {}),
    "dp2 pp2": ({"pp": 2}, {}),
    "dp2 pp2, sums of each pass": ({"pp": 2}, {"optimizer.sum_each_pass": True}),
    "adapters": ({"recompute": True}, {"lora.rank": 2}),
}
QUICK = ("dp2 tp2", "dp2 pp2", "adapters")


@pytest.fixture(scope="module")
def folder(written):
    """Returns checkpoints with tied embeddings."""
    return written(write_models)


@pytest.mark.parametrize(
    "grid", [pytest.param(grid, marks=[] if grid in QUICK else pytest.mark.slow) for grid in GRIDS]
)
def test_stages_of_whole_runs(grid, world, folder, make_group, monkeypatch):
    """Slices and stages that share weights, with several optimizer steps of several micro-batches."""
    monkeypatch.setattr(flat_layout, "BUCKET_NUMEL", 2000)
    options, values = GRIDS[grid]
    sizes = {"rollout_batch": 8, "mini_batch": 4, "micro_batch": 1, "parity_tolerance": 50.0}
    settings = replace(settings_of(folder, "plain"), **sizes)
    for name, value in {"optimizer.sum_each_pass": False, "ppo.epochs": 1, **values}.items():
        settings = with_value(settings, name, value)
    found = []
    for stage in STAGES:
        place, num_nodes = everywhere(zero=stage, **options), 2 if "nodes" in grid else 1
        program = compiled(settings, world.size, place, num_nodes=num_nodes)
        run = RunOf(settings, with_groups(world, program, make_group), program)
        metrics = run.iteration()
        engines = run.job.models.engines
        norms = {model: metrics[f"{model}_grad_norm"] for model in engines}
        found.append({model: After.of(engine, [norms[model]]) for model, engine in engines.items()})
        assert all(
            (engine._part_sums is not None) == (stage == 2 and grid != "adapters") for engine in engines.values()
        )
    if values.get("optimizer.sum_each_pass"):  # which adds in another order
        for model, after in found.pop().items():
            assert after.norms == pytest.approx(found[0][model].norms, rel=1e-5)
    for after in found[1:]:
        for model in after:
            after[model].assert_equal(found[0][model], state=False)
            common = found[0][model].state.keys() & after[model].state.keys()
            assert common and all(found[0][model].state[key] == after[model].state[key] for key in common)
