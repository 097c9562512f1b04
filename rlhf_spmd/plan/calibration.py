"""The measured constants of a machine: what seconds are computed from (cost.py).

Every constant is physical and is the same for all models, layouts and calls.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_spmd.errors import UserError

VERSION = 1  # of the meaning of these constants; a file of another version is refused


@dataclass(frozen=True, slots=True)
class Device:
    """One type of device.

    matrix_flops: what large products reach per second in the compute precision. memory_bytes_per_s: what a long read
    reaches. host_bytes_per_s: between host and device memory. layer_s: what a layer of a forward pass takes besides its
    products and messages (starting its kernels). decode_layer_s: the least that a layer of a decode step takes.
    num_workers: how many ranks of a node compute at full speed at the same time, because they share its cores; None:
    each rank has a device of its own.
    """

    matrix_flops: float
    memory_bytes_per_s: float
    host_bytes_per_s: float
    layer_s: float
    decode_layer_s: float
    num_workers: int | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """What joins two devices. bytes_per_s: of one device in one direction. latency_s: of one message."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """devices: by type. inside, between: links of devices of one node and of two. pipelined_prefill: whether a copy in
    stages cuts the prompts of generation into as many micro-batches, so that its stages work at the same time.
    provenance: where the numbers come from."""

    name: str
    devices: Mapping[str, Device]
    inside: Link
    between: Link
    provenance: str
    pipelined_prefill: bool = False

    def require(self, device: str) -> None:
        """Raises UserError unless this type of device has been measured."""
        if device not in self.devices:
            known = ", ".join(self.devices)
            raise UserError(
                f"calibration {self.name} does not know devices of type {device}, only {known}; choose another one, "
                "or measure this machine: python -m rlhf_spmd profile"
            )
