"""The meshes on which a model may run."""

from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.search.meshes import layouts, meshes
from tests.unit.plan.search.test_planner import CLUSTERS, llama


def test_meshes_are_slices_of_nodes_whole_nodes_and_eighths():
    found = {mesh.ranks for mesh in meshes(Cluster.parse("2x4"))}
    slices = {tuple(range(at, at + size)) for size in (1, 2, 4) for at in range(0, 8, size)}
    ends = {tuple(range(edge)) for edge in range(1, 9)} | {tuple(range(edge, 8)) for edge in range(8)}
    assert found == slices | ends


def test_no_mesh_has_two_types_of_devices():
    cluster = Cluster(CLUSTERS["mixed"])
    assert all(len({cluster.node_of(rank) for rank in mesh.ranks}) == 1 for mesh in meshes(cluster))


def test_slices_may_be_unequal():
    """LLaMA 33B has 52 heads: of 8 slices, some have 7 and some 6."""
    workload, cluster = llama("llama-33b", "2x8")
    for call in workload.workflow.placed_calls:
        found = list(layouts(call, meshes(cluster)[0], workload, cluster))
        assert {one.tp for one in found} == {1, 2, 4, 8}
