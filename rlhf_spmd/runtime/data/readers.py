"""Reads texts from files: a column of JSON lines or of Parquet, or the lines of a text file, each with its place."""

import json
from collections.abc import Iterator
from pathlib import Path

from rlhf_spmd.errors import UserError


def read_texts(path: Path, key: str) -> Iterator[tuple[str, str]]:
    """(place, prompt) of every entry; place is `line 7` or `row 7`, counted from 1."""
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet, ".txt": lambda path, key: _lines(path)}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{path}: unknown extension {path.suffix or '(none)'!r}: use one of {', '.join(readers)}")
    if not path.is_file():
        what = "is a folder: name a file in it" if path.is_dir() else f"does not exist (looked in {Path.cwd()})"
        raise UserError(f"prompt file {path} {what}")
    try:
        return iter(list(reader(path, key)))
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror or error}") from error


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


def _read_jsonl(path: Path, key: str) -> Iterator[tuple[str, str]]:
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
            raise UserError(f'{where}: {_kind(record)}, not an object: write {{"{key}": "..."}}')
        if key not in record:
            found = ", ".join(map(repr, record)) or "none"
            raise UserError(f"{where}: no key {key!r} (keys there: {found}): add it, or set data.key")
        if not isinstance(record[key], str):
            raise UserError(f"{where}: the value of {key!r} is {_kind(record[key])}, not a string")
        yield place, record[key]


def _read_parquet(path: Path, key: str) -> Iterator[tuple[str, str]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from None
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if key not in names:
                raise UserError(
                    f"{path}: no column {key!r} (columns there: {', '.join(map(repr, names))}): add it, or set data.key"
                )
            kind = file.schema_arrow.field(key).type
            values = file.read(columns=[key]).column(key).to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"{path} is not a readable Parquet file: {str(error).splitlines()[0]}") from None
    for number, value in enumerate(values, start=1):
        if not isinstance(value, str):
            what = "empty (null)" if value is None else f"of type {kind}, not a string"
            raise UserError(f"{path}, row {number}: the value of {key!r} is {what}")
        yield f"row {number}", value


def _kind(value: object) -> str:
    """The type of a JSON value, with its article."""
    if isinstance(value, bool):
        return "a boolean"
    names = {dict: "an object", list: "a list", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "null")
