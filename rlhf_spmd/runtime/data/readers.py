"""Reads the entries of data files (JSON lines, Parquet, text), each with its place for messages."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf_spmd.errors import UserError

INSTEAD = {"prompt": "messages"}  # the column that is read where this one is missing
CONVERSATION, TEXT = "messages", "text"  # that hold a prompt and a response
Record = dict[str, Any]  # column -> value


def others_of(key: str, columns: Sequence[str]) -> tuple[str, ...]:
    """The columns of which a row has one, if it has none with the prompt. columns: with responses."""
    if len(columns) > 1:
        return tuple(columns)[:1]
    return (CONVERSATION, TEXT) if columns else tuple(filter(None, [INSTEAD.get(key)]))


def read_records(path: Path, key: str, others: Sequence[str] | None = None) -> list[tuple[str, Record]]:
    """(place, columns) of every entry, which all have the column `key` or one of `others` (None: that of INSTEAD);
    place is `line 7` or `row 7`, counted from 1. Raises UserError naming file and place."""
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet, ".txt": _read_lines}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{path}: unknown extension {path.suffix or '(none)'!r}: use one of {', '.join(readers)}")
    if not path.is_file():
        what = "is a folder: name a file in it" if path.is_dir() else f"does not exist (looked in {Path.cwd()})"
        raise UserError(f"prompt file {path} {what}")
    try:
        return list(reader(path, key, others_of(key, ()) if others is None else others))
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror or error}") from error


def text_of(where: str, record: Record, key: str) -> str:
    """A column that must be a string. where: file and place."""
    if key not in record:
        raise UserError(f"{where}: no key {key!r} (keys there: {', '.join(map(repr, record))}): add it")
    if not isinstance(record.get(key), str):
        raise UserError(f"{where}: the value of {key!r} is {kind_of(record.get(key))}, not a string")
    return record[key]


def number_of(where: str, record: Record, key: str, default: float | None) -> float:
    """A column that must be a finite number; default: where it is missing or null; None: it must not be."""
    value = record.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise UserError(f"{where}: the value of {key!r} is {kind_of(value)}, not a finite number")
    return float(value)


def messages_of(where: str, record: Record, key: str) -> list[dict[str, str]]:
    """A column that must be a conversation: messages with `role` and `content`. Raises UserError."""
    if not isinstance(record[key], list):
        raise UserError(f"{where}: the value of {key!r} is {kind_of(record[key])}, not a list of messages")
    for number, message in enumerate(record[key], start=1):
        if not isinstance(message, dict) or not all(isinstance(message.get(part), str) for part in ("role", "content")):
            raise UserError(
                f'{where}: message {number} of {key!r} is {kind_of(message)}, not {{"role": "...", "content": "..."}} '
                "with two strings"
            )
    if not record[key]:
        raise UserError(f"{where}: {key!r} has no message")
    return record[key]


def _read_lines(path: Path, key: str, others: Sequence[str]) -> Iterator[tuple[str, Record]]:
    for place, line in _lines(path):
        yield place, {key: line}


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Numbered lines. Blank lines at the end of the file are ignored; elsewhere they are an error."""
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n\t ")
    for number, line in enumerate(content.split(b"\n") if content else [], start=1):
        try:
            yield f"line {number}", line.removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}, line {number}: byte {error.start + 1} is not UTF-8: save the file as UTF-8"
            ) from None


def _read_jsonl(path: Path, key: str, others: Sequence[str]) -> Iterator[tuple[str, Record]]:
    for place, line in _lines(path):
        where = f"{path}, {place}"
        if not line.strip():
            raise UserError(f"{where}: the line is blank: remove it")
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            message = getattr(error, "msg", str(error))
            raise UserError(
                f'{where}: not valid JSON{column} ({message}): each line is one object such as {{"{key}": "..."}}'
            ) from None
        if not isinstance(record, dict):
            raise UserError(f'{where}: {kind_of(record)}, not an object: write {{"{key}": "..."}}')
        if key not in record and not any(other in record for other in others):
            found = ", ".join(map(repr, record)) or "none"
            raise UserError(f"{where}: no key {key!r} (keys there: {found}): add it, or set data.key")
        yield place, record


def _read_parquet(path: Path, key: str, others: Sequence[str]) -> Iterator[tuple[str, Record]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from None
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if key not in names and not any(other in names for other in others):
                raise UserError(
                    f"{path}: no column {key!r} (columns there: {', '.join(map(repr, names))}): add it, or set data.key"
                )
            records = file.read().to_pylist()
    except pyarrow.ArrowException as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path} is not a readable Parquet file: {reason}") from None
    for number, record in enumerate(records, start=1):
        yield f"row {number}", record


def kind_of(value: object) -> str:
    """The type of a JSON value, with its article."""
    if isinstance(value, bool):
        return "a boolean"
    names = {dict: "an object", list: "a list", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "null")
