"""Reads a calibration, the measured constants of a machine (plan/calibration.py), from a JSON file."""

import difflib
import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.calibration import VERSION, Calibration, Device, Link


class _Device(BaseModel):
    model_config = ConfigDict(extra="forbid")

    matrix_flops: PositiveFloat
    memory_bytes_per_s: PositiveFloat
    host_bytes_per_s: PositiveFloat
    layer_s: NonNegativeFloat
    decode_layer_s: NonNegativeFloat
    num_workers: PositiveInt | None = None


class _Link(BaseModel):
    model_config = ConfigDict(extra="forbid")

    bytes_per_s: PositiveFloat
    latency_s: NonNegativeFloat


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: int
    provenance: str
    devices: dict[str, _Device] = Field(min_length=1)
    inside: _Link
    between: _Link
    pipelined_prefill: bool = False


SHIPPED = Path(__file__).parent / "calibrations"


def load_calibration(name: str) -> Calibration:
    """By name (`a100-80g`) or by file (`path/to/mine.json`). Raises UserError naming what is wrong with it."""
    if name.endswith(".json"):
        return read_calibration(name)
    known = sorted(path.stem for path in SHIPPED.glob("*.json"))
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise UserError(f"unknown calibration {name!r}{hint}; known: {', '.join(known)}, or give a file mine.json")
    return read_calibration(str(SHIPPED / f"{name}.json"))


def read_calibration(path: str) -> Calibration:
    """The calibration in a file. Raises UserError naming the file and what is wrong in it."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"calibration {path} cannot be read ({error.strerror}); give a .json file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"calibration {path} is not JSON: {error}") from None
    found = content.get("version") if isinstance(content, dict) else None
    if isinstance(found, int) and found != VERSION:
        raise UserError(f"calibration {path} has version {found}, this program reads {VERSION}; measure it again")
    try:
        file = _File.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "it"
        raise UserError(f"calibration {path}: {where}: {first['msg']}; see rlhf_spmd/calibration_file.py") from None
    devices = {kind: Device(**constants.model_dump()) for kind, constants in file.devices.items()}
    links = Link(**file.inside.model_dump()), Link(**file.between.model_dump())
    return Calibration(Path(path).stem, devices, *links, file.provenance, file.pipelined_prefill)
