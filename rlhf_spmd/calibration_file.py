"""Reads and writes a calibration, the measured constants of a machine (plan/cost/calibration.py), as a JSON file."""

import json
import os
import re
from dataclasses import asdict
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from rlhf_spmd.errors import UserError
from rlhf_spmd.option_names import did_you_mean
from rlhf_spmd.plan.cost.calibration import (
    VERSION,
    ByLength,
    Calibration,
    Curve,
    Device,
    Layered,
    Link,
    Machine,
    Measured,
)
from rlhf_spmd.plan.workload import ModelShape


class _Curve(BaseModel):
    model_config = ConfigDict(extra="forbid")

    amounts: tuple[PositiveFloat, ...]
    seconds: tuple[NonNegativeFloat, ...]

    def build(self) -> Curve:
        return Curve(self.amounts, self.seconds)


class _Layered(BaseModel):
    model_config = ConfigDict(extra="forbid")

    layer: _Curve
    rest: _Curve

    def build(self) -> Layered:
        return Layered(self.layer.build(), self.rest.build())


class _ByLength(BaseModel):
    model_config = ConfigDict(extra="forbid")

    lengths: tuple[PositiveFloat, ...]
    tables: tuple[_Layered, ...]

    def build(self) -> ByLength:
        return ByLength(self.lengths, tuple(table.build() for table in self.tables))


class _Measured(BaseModel):
    model_config = ConfigDict(extra="forbid")

    shape: ModelShape
    tp: PositiveInt
    param_bytes: PositiveInt
    forward: _ByLength
    train: _ByLength
    update: _Curve
    prefill: _ByLength | None = None
    decode: _Layered | None = None
    ends: _Curve | None = None

    def build(self) -> Measured:
        parts = {name: getattr(self, name) for name in ("forward", "train", "update", "prefill", "decode", "ends")}
        tables = {name: None if part is None else part.build() for name, part in parts.items()}
        return Measured(self.shape, self.tp, self.param_bytes, **tables)


class _Device(BaseModel):
    model_config = ConfigDict(extra="forbid")

    matrix_flops: PositiveFloat
    memory_bytes_per_s: PositiveFloat
    host_bytes_per_s: PositiveFloat
    layer_s: NonNegativeFloat
    decode_layer_s: NonNegativeFloat
    num_workers: PositiveFloat | None = None
    measured: tuple[_Measured, ...] = ()

    def build(self) -> Device:
        constants = {name: getattr(self, name) for name in type(self).model_fields if name != "measured"}
        return Device(**constants, measured=tuple(one.build() for one in self.measured))


class _Link(BaseModel):
    model_config = ConfigDict(extra="forbid")

    bytes_per_s: PositiveFloat
    latency_s: NonNegativeFloat


class _Machine(BaseModel):
    model_config = ConfigDict(extra="forbid")

    processor: str
    details: str
    cores: PositiveFloat
    threads: PositiveInt
    torch: str


class _CalibrationFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: int
    provenance: str
    devices: dict[str, _Device] = Field(min_length=1)
    inside: _Link
    between: _Link
    pipelined_prefill: bool = False
    machine: _Machine | None = None


SHIPPED = Path(__file__).parent / "calibrations"


def load_calibration(name: str) -> Calibration:
    """Loads a calibration by name (`a100-80g`) or file (`path/to/mine.json`). Raises UserError naming the error."""
    if name.endswith(".json"):
        return read_calibration(name)
    known = sorted(path.stem for path in SHIPPED.glob("*.json"))
    if name not in known:
        hint = did_you_mean(name, known)
        raise UserError(f"unknown calibration {name!r}{hint}; known: {', '.join(known)}, or give a file mine.json")
    return read_calibration(str(SHIPPED / f"{name}.json"))


def read_calibration(path: str) -> Calibration:
    """The calibration in a file. Raises UserError naming the file and the error in it."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"calibration {path} cannot be read ({error.strerror}); give a .json file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"calibration {path} is not JSON: {error}") from None
    version = content.get("version") if isinstance(content, dict) else None
    if isinstance(version, int) and version != VERSION:
        raise UserError(f"calibration {path} has version {version}, this program reads {VERSION}; measure it again")
    try:
        file = _CalibrationFile.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "it"
        raise UserError(f"calibration {path}: {where}: {first['msg']}; see rlhf_spmd/calibration_file.py") from None
    try:
        devices = {kind: device.build() for kind, device in file.devices.items()}
    except UserError as error:
        raise UserError(f"calibration {path}: {error}") from None
    links = Link(**file.inside.model_dump()), Link(**file.between.model_dump())
    machine = Machine(**file.machine.model_dump()) if file.machine else None
    return Calibration(Path(path).stem, devices, *links, file.provenance, file.pipelined_prefill, machine)


def check_out(path: str, *, overwrite: bool = False) -> None:
    """Raises UserError unless a calibration can be written there. Called before minutes of measuring."""
    file = Path(path)
    if file.suffix != ".json":
        raise UserError(f"--out {path} is not a .json file; name one")
    if file.is_dir() or not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise UserError(f"--out {path} cannot be written; name a file in an existing, writable folder")
    if file.exists() and not overwrite:
        raise UserError(f"--out {path} exists; name another file, or pass --overwrite")


def write_calibration(calibration: Calibration, path: str) -> None:
    """Writes a file for `read_calibration`. Raises UserError if the file cannot be written."""
    content = {"version": VERSION} | asdict(calibration)
    del content["name"]  # given by the file name
    text = json.dumps(_rounded(content), indent=2)
    text = re.sub(r"\[[^\[\]{}]*\]", lambda match: " ".join(match[0].split()), text)  # one line per row of numbers
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"calibration {path} cannot be written ({error.strerror}); name another file") from None


def _rounded(value: object) -> object:
    """Rounds floats to four digits, the precision of the measurements."""
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
