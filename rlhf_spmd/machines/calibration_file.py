"""Reads and writes a calibration, the measured constants of a machine (plan/cost/calibration.py), as a JSON file; finds
that of a cluster, and the share of its devices' memory that is reserved."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.json_text import json_value
from rlhf_spmd.files.reading import is_file, read_bytes
from rlhf_spmd.pages.option_suggestions import check_known
from rlhf_spmd.plan.cluster import RESERVE, Cluster
from rlhf_spmd.plan.cost.calibration import HOST_LINK, SOURCES, VERSION, Calibration, Device, Link, Machine

MAY_BE_ZERO = (  # all other numbers must be positive
    *("seconds", "layer_s", "decode_layer_s", "decode_reduce_s", "graph_layer_s", "latency_s"),
)
CPU_CALIBRATION = "cpu-2core"  # of ranks without a device of their own


class _CalibrationFile(BaseModel):
    """A calibration without its name, which is the name of the file. Unknown keys are errors, also in its parts."""

    model_config = ConfigDict(extra="forbid")

    version: int
    provenance: str
    devices: dict[str, Device] = Field(min_length=1)
    inside: Link
    between: Link
    pipelined_prefill: bool = False
    machine: Machine | None = None
    sources: dict[str, str] = Field(default_factory=dict)
    host: Link = HOST_LINK


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
        check_known(f"network of the calibration {name!r}", network, NETWORKS)
        found = load_calibration(machine)
        sources = dict(found.sources) | {f"between.{one}": "data sheet" for one in ("bytes_per_s", "latency_s")}
        return replace(found, name=f"{found.name}+{network}", between=NETWORKS[network], sources=sources)
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
        version = content.get("version") if isinstance(content, dict) else None
        if isinstance(version, int) and version != VERSION:
            raise UserError(f"it has version {version}, this program reads {VERSION}; measure it again")
        file = _CalibrationFile.model_validate(content)
        parts = {name: getattr(file, name) for name in _CalibrationFile.model_fields if name != "version"}
        calibration = Calibration(name=Path(path).stem, **parts)
        for wrong in _wrong_numbers(asdict(calibration)):
            raise UserError(wrong)
        return calibration
    except (OSError, ValueError, UserError) as error:  # of JSON, of the fields, of what they mean
        why = " ".join(str(error).split())
        raise UserError(f"calibration {path}: {why}; see rlhf_spmd/machines/calibration_file.py") from None


def _wrong_numbers(value: object, where: tuple[str, ...] = ()) -> Iterator[str]:
    """Yields a message for each number that is too small, with its place in the file. Shapes may have zeros."""
    if isinstance(value, dict | list | tuple):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            if name != "shape":
                yield from _wrong_numbers(part, (*where, str(name)))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        zero = not {*where[-2:]}.isdisjoint(MAY_BE_ZERO)  # a number in a list has the name before its place
        if not (value >= 0 if zero else value > 0):
            yield f"{'.'.join(where)}: {value} should be {'at least' if zero else 'greater than'} 0"


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
    known, shares = calibration.devices if calibration else {}, dict.fromkeys(cluster.device_types, RESERVE)
    for name, device in known.items():
        if name in shares:
            shares[name] = max(RESERVE, device.reserve or 0.0)
    return cluster.reserving(shares if share is None else dict.fromkeys(shares, share))
