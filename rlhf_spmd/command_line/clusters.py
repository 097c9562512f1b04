"""The cluster of the ranks that run."""

from typing import Any

from rlhf_spmd.machines.cluster_file import on_machines, read_cluster
from rlhf_spmd.plan.cluster import Cluster, Node
from rlhf_spmd.runtime.world.devices import type_of


def cluster_of(world: Any, path: str | None, device_type: str) -> Cluster:
    """Returns the cluster of this world: as a file describes it, else nodes with the devices that the ranks found.
    device_type: the option.
    """
    if path:
        return on_machines(read_cluster(path), world.nodes, path)
    nodes = []
    for node in range(world.num_nodes):
        of_node = [device for device, its_node in zip(world.chosen, world.nodes, strict=True) if its_node == node]
        first = min(of_node, key=lambda device: device.num_bytes or 0)
        if first.index is None:
            nodes.append(Node(len(of_node), "cpu", None))
            continue
        kind = type_of(first, device_type)
        most = max(device.num_ranks for device in of_node)  # ranks that share a device have a part of it each
        nodes.append(Node(len(of_node), kind, first.num_bytes // most))
    return Cluster(tuple(nodes))
