"""The meshes on which a model may run."""

from dataclasses import replace
from itertools import product

import pytest

from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.search.meshes import layouts, meshes
from rlhf_spmd.plan.validate import validate
from rlhf_spmd.plan.workload import ModelShape
from tests.programs import make_workload
from tests.unit.plan.search.test_planner import CLUSTERS


def test_meshes_are_slices_of_nodes_whole_nodes_and_eighths():
    found = {mesh.ranks for mesh in meshes(Cluster.parse("2x4"))}
    slices = {tuple(range(at, at + size)) for size in (1, 2, 4) for at in range(0, 8, size)}
    ends = {tuple(range(edge)) for edge in range(1, 9)} | {tuple(range(edge, 8)) for edge in range(8)}
    assert found == slices | ends


@pytest.mark.parametrize("layout", ["1x3", "1x5", "1x6", "3x2"])
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_what_the_strategies_can_take_is_searched(layout, micro_batch):
    """Also on 3, 5 and 6 devices, with micro-batches that divide the rows of a shard."""
    cluster = Cluster.parse(layout)
    shape = ModelShape(6, 64, 176, 8, 6, 8, 512)
    workload = replace(make_workload(mini_batch=30, shape=shape), micro_batch=micro_batch)
    call = workload.workflow.call("actor_train")
    everywhere = next(mesh for mesh in meshes(cluster) if mesh.size == cluster.num_devices)
    searched = {(one.pp, one.tp, one.zero, one.micro_batch) for one in layouts(call, everywhere, workload, cluster)}
    taken = set()
    per_node = cluster.num_devices // len(cluster.nodes)
    for pp, tp, zero in product((1, 2, 3, 5, 6), (1, 2, 3, 5, 6), (0, 1, 2, 3)):
        dp, left = divmod(cluster.num_devices, pp * tp)
        if left or per_node % tp or (pp > 1 and zero > 1) or (dp == 1 and zero):
            continue
        for size in (size for size in range(1, 31) if (30 // dp) % size == 0):
            options = {"training_tp": tp, "training_pp": pp, "zero": zero, "micro_batch": size}
            placement = load_strategy("reallocation").place(workload, cluster, **options)
            validate(placement, workload, cluster)
            taken.add((pp, tp, zero, size))
    assert taken and taken <= searched


def test_no_mesh_has_two_types_of_devices():
    cluster = Cluster(CLUSTERS["mixed"])
    assert all(len({cluster.node_of(rank) for rank in mesh.ranks}) == 1 for mesh in meshes(cluster))
