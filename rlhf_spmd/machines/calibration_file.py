"""Reads and writes a calibration, the measured constants of a machine (plan/cost/calibration.py), as a JSON file."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.json_text import json_value
from rlhf_spmd.files.reading import is_file, read_bytes
from rlhf_spmd.pages.option_suggestions import did_you_mean
from rlhf_spmd.plan.cost.calibration import HOST_LINK, SOURCES, VERSION, Calibration, Device, Link, Machine

MAY_BE_ZERO = (
    "seconds",
    "layer_s",
    "decode_layer_s",
    "decode_reduce_s",
    "graph_layer_s",
    "latency_s",
)  # all other numbers must be positive


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
        if network not in NETWORKS:
            hint = did_you_mean(network, NETWORKS)
            raise UserError(f"calibration {name!r}: unknown network {network!r}{hint}; known: {', '.join(NETWORKS)}")
        found = load_calibration(machine)
        sources = dict(found.sources) | {f"between.{one}": "data sheet" for one in ("bytes_per_s", "latency_s")}
        return replace(found, name=f"{found.name}+{network}", between=NETWORKS[network], sources=sources)
    if "," in name and not is_file(name):
        return joined([load_calibration(one) for one in name.split(",")])
    if name.endswith(".json"):
        return read_calibration(name)
    known = sorted(path.stem for path in SHIPPED.glob("*.json"))
    if name not in known:
        hint = did_you_mean(name, known)
        raise UserError(f"unknown calibration {name!r}{hint}; known: {', '.join(known)}, or give a file mine.json")
    return read_calibration(str(SHIPPED / f"{name}.json"))


def joined(parts: Sequence[Calibration]) -> Calibration:
    """Returns one calibration of the devices of several. What belongs to a device stays with it; a link has the lowest
    bandwidth and the highest latency of all, also inside a node, and a source is the least certain. Raises UserError if
    two know the same type."""
    devices: dict[str, Device] = {}
    for part in parts:
        if twice := devices.keys() & part.devices.keys():
            names = ", ".join(one.name for one in parts)
            raise UserError(f"calibrations {names}: two of them know {min(twice)}; name one for each type of device")
        devices |= part.devices
    told = [(name, source) for part in parts for name, source in part.sources.items()]
    told.sort(key=lambda pair: SOURCES.index(pair[1]))  # of two for one name, the later counts
    return Calibration(
        name=",".join(part.name for part in parts),
        devices=devices,
        provenance=" ".join(f"{part.name}: {part.provenance}" for part in parts),
        pipelined_prefill=all(part.pipelined_prefill for part in parts),
        sources=dict(told),
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
    except OSError as error:
        raise UserError(f"calibration {path} cannot be read ({error.strerror}); give a .json file") from None
    except ValueError as error:
        raise UserError(f"calibration {path} is not JSON: {error}") from None
    version = content.get("version") if isinstance(content, dict) else None
    if isinstance(version, int) and version != VERSION:
        raise UserError(f"calibration {path} has version {version}, this program reads {VERSION}; measure it again")
    try:
        file = _CalibrationFile.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "it"
        raise UserError(
            f"calibration {path}: {where}: {first['msg']}; see rlhf_spmd/machines/calibration_file.py"
        ) from None
    except UserError as error:  # of a table
        raise UserError(f"calibration {path}: {error}") from None
    parts = {name: getattr(file, name) for name in _CalibrationFile.model_fields if name != "version"}
    try:
        found = Calibration(name=Path(path).stem, **parts)
    except UserError as error:  # of its sources
        raise UserError(f"calibration {path}: {error}") from None
    if wrong := next(_wrong_numbers(asdict(found)), None):
        raise UserError(f"calibration {path}: {wrong}; see rlhf_spmd/machines/calibration_file.py")
    return found


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
