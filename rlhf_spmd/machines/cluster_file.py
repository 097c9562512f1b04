"""Reads a cluster file (TOML), which describes the nodes of a cluster with several device types.

[[nodes]]
count = 2                # nodes of this kind, in rank order (default 1)
devices = 8              # per node
device = "a100-80g"
host_gib = 1024          # memory of a node for what is offloaded; without it no limit is known

[[nodes]]
devices = 8
device = "mine"

[types.mine]             # a type that this program does not know
memory_gib = 48          # optional; without it no limit is known
"""

import tomllib
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import read_bytes
from rlhf_spmd.pages.option_suggestions import check_known
from rlhf_spmd.plan.cluster import DEVICE_BYTES, MAX_DEVICES, Cluster, Node


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Kind(_Strict):
    devices: PositiveInt
    device: str
    count: PositiveInt = 1
    host_gib: PositiveFloat | PositiveInt | None = None


class _Type(_Strict):
    memory_gib: PositiveFloat | PositiveInt | None = None


class _ClusterFile(_Strict):
    nodes: Annotated[list[_Kind], Field(min_length=1)]
    types: dict[str, _Type] = {}


def read_cluster(path: str) -> Cluster:
    """Returns the cluster that a file describes. Raises UserError naming the file and the error in it."""
    try:
        file = _ClusterFile.model_validate(tomllib.loads(read_bytes(path).decode()))
    except (OSError, ValueError) as error:  # of TOML, of UTF-8, of the fields, or a NUL in the path
        why = " ".join(str(error).split())
        raise UserError(f"cluster file {path}: {why}; see rlhf_spmd/machines/cluster_file.py") from None
    known = {name: about.memory_gib and int(about.memory_gib * 2**30) for name, about in file.types.items()}
    nodes: list[Node] = []
    for kind in file.nodes:
        more = f", or describe it in [types.{kind.device}]"
        check_known(f"device type in {path}", kind.device, DEVICE_BYTES | known, more)
        memory = known.get(kind.device) or DEVICE_BYTES.get(kind.device)
        if kind.count * kind.devices > MAX_DEVICES:
            raise UserError(f"cluster file {path} has too many devices; at most {MAX_DEVICES:,} can be planned for")
        host = None if kind.host_gib is None else int(kind.host_gib * 2**30)
        nodes += [Node(kind.devices, kind.device, memory, host_bytes=host)] * kind.count
    return Cluster(tuple(nodes))


def on_machines(cluster: Cluster, machines: tuple[int, ...], path: str) -> Cluster:
    """Returns the cluster if it matches the ranks of this world: as many devices as ranks, and every node on one
    machine (a machine may represent several nodes). machines: of every rank. Raises UserError otherwise."""
    if cluster.num_devices != len(machines):
        raise UserError(
            f"cluster file {path} has {cluster.num_devices} devices for {len(machines)} ranks; start as many"
        )
    for rank in cluster.ranks[1:]:
        if cluster.node_of(rank) == cluster.node_of(rank - 1) and machines[rank] != machines[rank - 1]:
            raise UserError(
                f"cluster file {path} has ranks {rank - 1} and {rank} on one node, but they run on two machines; give "
                "the nodes as many devices as the machines have ranks"
            )
    return cluster
