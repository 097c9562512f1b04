"""The calibration of a cluster, and the share of its devices' memory that is reserved."""

from rlhf_spmd.errors import UserError
from rlhf_spmd.machines.calibration_file import SHIPPED, load_calibration
from rlhf_spmd.plan.cluster import RESERVE, Cluster
from rlhf_spmd.plan.cost.calibration import Calibration

CPU_CALIBRATION = "cpu-2core"  # of ranks without a device of their own


def calibration_for(name: str | None, cluster: Cluster, *, required: bool = False) -> Calibration | None:
    """Returns the named calibration, else those of this program that are shipped for the cluster's types of device,
    joined; None if one is missing, unless it is required. Raises UserError, also if the calibration lacks a device
    type."""
    if name is None:
        names = {one: CPU_CALIBRATION if one == "cpu" else f"{one}-derived" for one in cluster.device_types}
        missing = [device for device, one in names.items() if not (SHIPPED / f"{one}.json").is_file()]
        if missing and required:
            raise UserError(f"no calibration of {', '.join(missing)} is shipped; give --calibration FILE.json")
        if missing:
            return None
        name = ",".join(names.values())
    found = load_calibration(name)
    for device in cluster.device_types:
        found.require(device)
    return found


def with_reserve(cluster: Cluster, share: float | None, calibration: Calibration | None) -> Cluster:
    """Returns the cluster with a share of each device's memory reserved. share: the option; None: what the calibration
    says of the type of device, and at least RESERVE."""
    known = calibration.devices if calibration else {}
    told = {device: known[device].reserve or 0.0 if device in known else 0.0 for device in cluster.device_types}
    shares = {device: max(RESERVE, of_device) for device, of_device in told.items()}
    return cluster.reserving(shares if share is None else dict.fromkeys(shares, share))
