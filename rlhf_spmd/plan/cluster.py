"""The machines: nodes of devices with their memory. A layout string `NxG` is N nodes of G devices each.

A program may not fill a device: a share of its memory is reserved for what no formula counts (the driver's context,
buffers of NCCL, workspaces of matrix products, fragments between allocations).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from rlhf_spmd.errors import UserError

# Device memory in bytes by device type; None where no limit is known (host memory is shared by the ranks of a node).
DEVICE_BYTES: dict[str, int | None] = {
    "cpu": None,
    "a100-40g": 40 * 2**30,
    "a100-80g": 80 * 2**30,
    "h100-80g": 80 * 2**30,
    "h200-141g": 141 * 2**30,
}
RESERVE = 0.06  # least share of a device's memory that is reserved unless an option says otherwise
MAX_DEVICES = 4096  # a program lists every rank's instructions: larger clusters would take minutes and gigabytes


def device_type_of(name: str, num_bytes: int) -> str:
    """Returns the type of a device by its name and memory as torch reports them, e.g. "NVIDIA H100 80GB HBM3". An
    unknown device gets a type of its own, for which there is no calibration."""
    for known, limit in DEVICE_BYTES.items():
        model = known.partition("-")[0]
        if limit is not None and model in re.split(r"[^a-z0-9]+", name.lower()) and abs(num_bytes / limit - 1) < 0.1:
            return known
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@dataclass(frozen=True, slots=True)
class Node:
    """One machine: its number of devices (one per rank), their type, the memory of each (None: no known limit), the
    share of it that is reserved, and the memory of the host for what is offloaded (None: unknown)."""

    num_devices: int
    device: str = "cpu"
    device_bytes: int | None = None
    reserve: float = field(default=RESERVE, repr=False)  # what a program does, and its fingerprint, ignore these two
    host_bytes: int | None = field(default=None, repr=False)

    @property
    def usable_bytes(self) -> int | None:
        """The memory of a device that a program may use; None: no known limit."""
        return None if self.device_bytes is None else int(self.device_bytes * (1 - self.reserve))


@dataclass(frozen=True)
class Cluster:
    """Nodes in rank order: rank r is the r-th device, counted over all nodes."""

    nodes: tuple[Node, ...]

    @classmethod
    def parse(cls, layout: str, device: str = "cpu") -> "Cluster":
        """Reads a layout: `Cluster.parse("2x8")` has two nodes of eight devices. Raises UserError for anything else."""
        match = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", layout)
        if not match:
            raise UserError(f"layout {layout!r} is not of the form NxG (N nodes of G devices), e.g. 2x8")
        if device not in DEVICE_BYTES:
            known = ", ".join(DEVICE_BYTES)
            raise UserError(f"unknown device type {device!r}; known: {known}; a --cluster file describes others")
        num_nodes, num_devices = int(match[1]), int(match[2])
        if (total := num_nodes * num_devices) > MAX_DEVICES:
            raise UserError(f"layout {layout} has {total:,} devices; at most {MAX_DEVICES:,} can be planned for")
        return cls((Node(num_devices, device, DEVICE_BYTES[device]),) * num_nodes)

    @property
    def num_devices(self) -> int:
        return sum(node.num_devices for node in self.nodes)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.num_devices))

    @property
    def device_types(self) -> tuple[str, ...]:
        """Every type of device once, in rank order."""
        return tuple(dict.fromkeys(node.device for node in self.nodes))

    def ranks_of(self, device: str) -> tuple[int, ...]:
        """Returns the ranks on devices of one type."""
        return tuple(rank for rank in self.ranks if self.nodes[self.node_of(rank)].device == device)

    @cached_property
    def _node_of(self) -> tuple[int, ...]:
        return tuple(index for index, node in enumerate(self.nodes) for _ in range(node.num_devices))

    def node_of(self, rank: int) -> int:
        """Returns index of the node that rank lives on."""
        assert 0 <= rank < len(self._node_of), "rank outside the cluster"
        return self._node_of[rank]

    def device_bytes(self, rank: int) -> int | None:
        """Returns memory of the rank's device, None if no limit is known."""
        return self.nodes[self.node_of(rank)].device_bytes

    def usable_bytes(self, rank: int) -> int | None:
        """Returns what of it a program may use."""
        return self.nodes[self.node_of(rank)].usable_bytes

    def reserving(self, shares: Mapping[str, float]) -> "Cluster":
        """Returns a copy with other shares of memory reserved, by type of device."""
        return Cluster(tuple(replace(node, reserve=shares.get(node.device, node.reserve)) for node in self.nodes))

    def with_hosts(self, free: Sequence[float]) -> "Cluster":
        """Returns a copy with the memory that the ranks found free on their hosts."""
        least = [
            min(free[rank] for rank in self.ranks if self.node_of(rank) == node) for node in range(len(self.nodes))
        ]
        nodes = zip(self.nodes, map(int, least), strict=True)
        return Cluster(tuple(replace(node, host_bytes=node.host_bytes or found) for node, found in nodes))

    def __str__(self) -> str:
        sizes = {node.num_devices for node in self.nodes}
        if len(sizes) == 1:
            return f"{len(self.nodes)}x{sizes.pop()}"
        return "+".join(str(node.num_devices) for node in self.nodes)
