"""The cluster of this job: the types of its devices, and what ranks that share one have of it."""

from types import SimpleNamespace

import pytest

from rlhf_spmd.command_line import ranks
from rlhf_spmd.command_line.ranks import cluster_of
from rlhf_spmd.config import presets
from rlhf_spmd.plan.cluster import Cluster, device_type_of
from rlhf_spmd.runtime.world.devices import choose_devices
from tests.unit.command_line.test_fitting_strategies import H100, world_of


def test_ranks_that_share_a_device_have_a_part_of_it_each():
    cluster = cluster_of(world_of(4, *H100, wanted="shared", num_devices=1), None, "cpu")
    assert cluster.num_devices == 4 and cluster.device_bytes(3) == H100[1] // 4
    named = cluster_of(world_of(2, *H100), None, "mine")
    assert named.device_types == ("mine",)
    on_cpu = SimpleNamespace(
        nodes=(0, 0), num_nodes=1, chosen=choose_devices("cpu", [[], []], "", (0, 0), ("here",) * 2)
    )
    assert cluster_of(on_cpu, None, "cpu") == Cluster.parse("1x2")


def test_ranks_with_gpus_tell_what_their_hosts_have(monkeypatch):
    monkeypatch.setattr(ranks, "free_memory", lambda: 2.5 * 2**30)
    world = world_of(2, *H100)
    world.computes, world.allgather = world.chosen[0], lambda value, what: [value, value - 2**30]
    cluster, _ = ranks.cluster_of_run(world, presets.load("tiny"), None)
    assert [node.host_bytes for node in cluster.nodes] == [3 * 2**29]


@pytest.mark.parametrize(
    ("name", "gib", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 79.2, "h100-80g"),
        ("NVIDIA H200", 139.8, "h200-141g"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40g"),
        ("AMD Instinct MI300X", 191.9, "amd-instinct-mi300x"),
    ],
)
def test_types_of_devices_follow_from_their_names(name, gib, expected):
    assert device_type_of(name, int(gib * 2**30)) == expected
