"""The meshes on which a model may run."""

from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.search.meshes import meshes
from tests.unit.plan.search.test_planner import CLUSTERS


def test_meshes_are_slices_of_nodes_whole_nodes_and_eighths():
    found = {mesh.ranks for mesh in meshes(Cluster.parse("2x4"))}
    slices = {tuple(range(at, at + size)) for size in (1, 2, 4) for at in range(0, 8, size)}
    ends = {tuple(range(edge)) for edge in range(1, 9)} | {tuple(range(edge, 8)) for edge in range(8)}
    assert found == slices | ends


def test_no_mesh_has_two_types_of_devices():
    cluster = Cluster(CLUSTERS["mixed"])
    assert all(len({cluster.node_of(rank) for rank in mesh.ranks}) == 1 for mesh in meshes(cluster))
