"""Reads and writes a calibration, the measured constants of a machine (plan/cost/calibration.py), as a JSON file; finds
that of a cluster, and the share of its devices' memory that is reserved."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.json_text import json_value
from rlhf_spmd.files.reading import is_file, read_bytes
from rlhf_spmd.pages.option_suggestions import check_known
from rlhf_spmd.plan.cluster import RESERVE, Cluster
from rlhf_spmd.plan.cost.calibration import SOURCES, VERSION, Calibration, Device, Link

MAY_BE_ZERO = (  # all other numbers must be positive
    *("seconds", "layer_s", "decode_layer_s", "decode_reduce_s", "graph_layer_s", "latency_s"),
)
CPU_CALIBRATION = "cpu-2core"  # of ranks without a device of their own


class _File(BaseModel):
    """What a file holds, but for its version and the name, which is that of the file. Unknown keys are errors, also in
    its parts."""

    model_config = ConfigDict(extra="forbid")

    calibration: Calibration


SHIPPED = Path(__file__).parent / "calibrations"


NETWORKS = {  # between nodes: of one device while all devices of its node send
    "200g-per-gpu": Link(25e9, 1e-5),
    "200g-per-node": Link(25e9 / 8, 1e-5),
}


def load_calibration(name: str) -> Calibration:
    """Loads a calibration by name (`a100-80g`) or file (`path/to/mine.json`), or those of several types of device, with
    commas; `+NETWORK` after it replaces the link between nodes (`a100-80g+200g-per-node`). Raises UserError naming the
    error."""
    machine, plus, network = name.rpartition("+")
    if plus and (network in NETWORKS or not name.endswith(".json")):
        more = "; for another one copy rlhf_spmd/machines/calibrations/NAME.json and change its `between`"
        check_known(f"network of the calibration {name!r}", network, NETWORKS, more)
        calibration = load_calibration(machine)
        sources = {**calibration.sources, "between.bytes_per_s": "data sheet", "between.latency_s": "data sheet"}
        full_name = f"{calibration.name}+{network}"
        return replace(calibration, name=full_name, between=NETWORKS[network], sources=sources)
    if "," in name and not is_file(name):
        return joined([load_calibration(part) for part in name.split(",")])
    if name.endswith(".json"):
        return read_calibration(name)
    known = sorted(path.stem for path in SHIPPED.glob("*.json"))
    check_known("calibration", name, known, ", or give a file mine.json")
    return read_calibration(str(SHIPPED / f"{name}.json"))


def joined(parts: Sequence[Calibration]) -> Calibration:
    """Returns one calibration of the devices of several. What belongs to a device stays with it; a link has the lowest
    bandwidth and the highest latency of all, also inside a node, and a source is the least certain. Raises UserError if
    two know the same type."""
    devices: dict[str, Device] = {}
    for part in parts:
        if twice := devices.keys() & part.devices.keys():
            raise UserError(f"two of the calibrations know {min(twice)}; name one for each type of device")
        devices |= part.devices
    sources = [(name, source) for part in parts for name, source in part.sources.items()]
    sources.sort(key=lambda pair: SOURCES.index(pair[1]))  # of two for one name, the later counts
    return Calibration(
        name=",".join(part.name for part in parts),
        devices=devices,
        provenance=" ".join(f"{part.name}: {part.provenance}" for part in parts),
        pipelined_prefill=all(part.pipelined_prefill for part in parts),
        sources=dict(sources),
        inside=_slowest([part.inside for part in parts]),
        between=_slowest([part.between for part in parts]),
        host=_slowest([part.host for part in parts]),
    )


def _slowest(links: Sequence[Link]) -> Link:
    return Link(min(link.bytes_per_s for link in links), max(link.latency_s for link in links))


def read_calibration(path: str) -> Calibration:
    """Returns the calibration in a file. Raises UserError naming the file and the error in it."""
    try:
        content = json_value(read_bytes(path))
        if not isinstance(content, dict) or content.pop("version", None) != VERSION:
            raise UserError(f"it is not an object of version {VERSION}; measure it again")
        calibration = _File.model_validate({"calibration": content | {"name": Path(path).stem}}).calibration
        if not calibration.devices:
            raise UserError("it has no devices")
        _check_numbers(asdict(calibration))
        return calibration
    except (OSError, ValueError, UserError) as error:  # of JSON, of the fields, of what they mean
        why = " ".join(str(error).split())
        raise UserError(f"calibration {path}: {why}; see rlhf_spmd/machines/calibration_file.py") from None


def _check_numbers(value: Any, *where: str) -> None:
    """Raises UserError for a number that is too small, with its place in the file. Shapes may have zeros."""
    if isinstance(value, dict):
        for name, part in value.items():
            if name != "shape":
                _check_numbers(part, *where, name)
    elif isinstance(value, list | tuple):
        for part in value:
            _check_numbers(part, *where)
    elif type(value) in (int, float) and not (value > 0 or value == 0 and where[-1] in MAY_BE_ZERO):
        zero = "at least" if where[-1] in MAY_BE_ZERO else "greater than"
        raise UserError(f"{'.'.join(where)}: {value} should be {zero} 0")


def write_calibration(calibration: Calibration, path: str) -> None:
    """Writes a file for `read_calibration`. Raises UserError if the file cannot be written."""
    content = {"version": VERSION} | asdict(calibration)
    del content["name"]  # given by the file name
    # four digits, the precision of the measurements
    content = json.loads(json.dumps(content), parse_float=lambda digits: float(f"{float(digits):.4g}"))
    text = json.dumps(content, indent=2)
    text = re.sub(r"\[[^\[\]{}]*\]", lambda match: " ".join(match[0].split()), text)  # one line per row of numbers
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"calibration {path} cannot be written ({error.strerror}); name another file") from None


def calibration_for(name: str | None, cluster: Cluster, *, required: bool = False) -> Calibration | None:
    """Returns the named calibration, else those of this program that are shipped for the cluster's types of device,
    joined; None if one is missing, unless it is required. Raises UserError, also if the calibration lacks a device
    type."""
    if name is None:
        names = {device: CPU_CALIBRATION if device == "cpu" else f"{device}-derived" for device in cluster.device_types}
        missing = [device for device, file in names.items() if not (SHIPPED / f"{file}.json").is_file()]
        if missing and required:
            raise UserError(f"no calibration of {', '.join(missing)} is shipped; give --calibration FILE.json")
        if missing:
            return None
        name = ",".join(names.values())
    calibration = load_calibration(name)
    for device in cluster.device_types:
        calibration.require(device)
    return calibration


def with_reserve(cluster: Cluster, share: float | None, calibration: Calibration | None) -> Cluster:
    """Returns the cluster with a share of each device's memory reserved. share: the option; None: what the calibration
    says of the type of device, and at least RESERVE."""
    known = calibration.devices if calibration else {}
    shares = dict.fromkeys(cluster.device_types, RESERVE if share is None else share)
    for name in shares if share is None else ():
        shares[name] = max(RESERVE, name in known and known[name].reserve or 0.0)
    return cluster.reserving(shares)
