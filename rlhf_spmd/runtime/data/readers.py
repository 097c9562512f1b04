"""Reads the entries of data files, each with its place for messages: JSON lines and text by itself, tables (CSV,
Parquet, Arrow) with pyarrow."""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.data_files import ARROW, CSV, KINDS, PACKED, TABLES, is_packed, kind_of_file, read_data
from rlhf_spmd.files.reading import no_memory, why_no_file
from rlhf_spmd.pages.option_suggestions import did_you_mean

CONVERSATIONS = ("messages", "conversations", "conversation")  # columns of whole conversations
CONVERSATION, TEXT = CONVERSATIONS[0], "text"  # that hold a prompt and a response
SOURCE = "data_source"  # a column: where a row comes from
INSTEAD = {"prompt": CONVERSATIONS}  # the columns of which the first is read where this one is missing
Record = dict[str, Any]  # column -> value
FLOAT32_MAX = 3.4028234663852886e38
KINDS_OF_VALUES: dict[type, str] = {
    dict: "an object",
    list: "a list",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    bytes: "bytes that are not UTF-8",
    type(None): "null",
}


def others_of(key: str, columns: Sequence[str]) -> tuple[str, ...]:
    """Returns the columns of which a row has one, if it has none with the prompt. columns: with responses."""
    if len(columns) > 1:
        return tuple(columns)[:1]
    return (*CONVERSATIONS, TEXT) if columns else INSTEAD.get(key, ())


def first_of(record: Mapping[str, Any], columns: Sequence[str]) -> str | None:
    """Returns the first of these columns that the row has; null counts as missing."""
    return next((column for column in columns if record.get(column) is not None), None)


def lacks(where: str, record: Record, key: str, fix: str = "add it") -> UserError:
    """Returns the error for a row that lacks such a column, or has null in it."""
    if key in record:
        return UserError(f"{where}: the value of {key!r} is null: give it a value")
    return UserError(f"{where}: no key {key!r} (keys there: {', '.join(map(repr, record)) or 'none'}): {fix}")


def no_column(asks: str, name: str, columns: Sequence[str], words: Sequence[str]) -> UserError:
    """Returns the error for a parameter of the user's code that is neither a column nor a word of the program.

    asks: what asks for it.
    columns: of the data set.
    """
    there = ", ".join(columns) or "there is none besides the prompts"
    hint = did_you_mean(name, [*columns, *words])
    return UserError(
        f"{asks}, which is not a column of the data set ({there}), nor one of {', '.join(words)}{hint}: add the "
        "column, or rename the parameter"
    )


def kind_of(value: object) -> str:
    """Returns the type of a value of a data file, with its article."""
    return KINDS_OF_VALUES.get(type(value), f"a value of the type {type(value).__name__}")


def text_of(where: str, record: Record, key: str) -> str:
    """Returns a column that must be a string. where: file and place."""
    if record.get(key) is None:
        raise lacks(where, record, key)
    if not isinstance(record[key], str):
        raise UserError(f"{where}: the value of {key!r} is {kind_of(record[key])}, not a string")
    return record[key]


def number_of(where: str, record: Record, key: str, default: float | None) -> float:
    """Returns a column that must be a finite number.

    where: file and place.
    default: used where it is missing or null; None: it must not be.
    """
    value = record.get(key)
    if value is None:
        if default is None:
            raise lacks(where, record, key)
        return default
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float | Decimal)
        or not -FLOAT32_MAX <= value <= FLOAT32_MAX
    ):
        kind = str(value) if isinstance(value, float) else kind_of(value)
        raise UserError(f"{where}: the value of {key!r} is {kind}, not a finite number")
    return float(value)


def without_nulls_inside(record: Record) -> Record:
    """Returns a row whose values have no keys that are null: Arrow gives all objects of a column the same keys."""
    return {name: _without_nulls(value) for name, value in record.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


# ---- files ----------------------------------------------------------------------------------------------------------


def read_records(
    path: Path, key: str, others: Sequence[str] | None = None, *, most: int | None = None
) -> list[tuple[str, Record]]:
    """Returns (place, columns) of every entry, which all have the column `key` or one of `others` (None: those of
    INSTEAD); place is `line 7` or `row 7`, counted from 1. Raises UserError naming file and place.

    most: only so many entries are read, the first ones.
    """
    wanted = (key, *(others_of(key, ()) if others is None else others))
    kind = kind_of_file(path)
    if kind not in KINDS or (kind in TABLES and is_packed(path)):
        raise UserError(
            f"{path}: files of the kind '{kind}{PACKED * is_packed(path)}' are not read: use one of "
            f"{', '.join(KINDS)}, those of text also with {PACKED}"
        )
    if why := why_no_file(path):
        raise UserError(f"prompt file {path} {why}")
    try:
        entries = list(islice(_entries(path, key, most), most))
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror or error}") from error
    except MemoryError:
        raise no_memory(path) from None
    for place, record in entries:
        if not isinstance(record, dict):
            raise UserError(f'{path}, {place}: {kind_of(record)}, not an object: write {{"{key}": "..."}}')
        if first_of(record, wanted) is None:
            null = next((name for name in wanted if name in record), key)
            raise lacks(f"{path}, {place}", record, null, "add it, or set data.key")
    return entries


def _entries(path: Path, key: str, most: int | None) -> Iterator[tuple[str, Any]]:
    """Yields the place and the value of every entry of a file."""
    kind = kind_of_file(path)
    if kind in (CSV, *TABLES):
        yield from _rows_of_table(path, most)
        return
    content = read_data(path, most if kind != ".json" else None).removeprefix(b"\xef\xbb\xbf")
    if kind == ".json" and content.lstrip().startswith(b"["):
        rows = _parsed(str(path), _decoded(str(path), content), f'it is a list of objects such as {{"{key}": "..."}}')
        yield from ((f"row {number}", row) for number, row in enumerate(rows, start=1))
        return
    form = f'each line is one object such as {{"{key}": "..."}}, or the file (.json) is a list of objects'
    content = content.rstrip(b"\r\n\t ")
    for number, line in enumerate(content.split(b"\n") if content else [], start=1):
        where = f"{path}, line {number}"
        text = _decoded(where, line.removesuffix(b"\r"))
        yield f"line {number}", {key: text} if kind == ".txt" else _parsed(where, text, form)


def _decoded(where: str, content: bytes) -> str:
    """Returns bytes as text. Raises UserError."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: byte {error.start + 1} is not UTF-8: save the file as UTF-8") from None


def _parsed(where: str, text: str, form: str) -> Any:
    """Returns the value that JSON text says. Raises UserError. form: how it is to be written."""
    if not text.strip():
        raise UserError(f"{where}: the line is blank: remove it")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error}): {form}") from None


# ---- tables ---------------------------------------------------------------------------------------------------------


def _rows_of_table(path: Path, most: int | None) -> Iterator[tuple[str, Record]]:
    """Yields the rows of a table under the names of its columns. Raises UserError."""
    import pyarrow

    reader = {CSV: _read_csv, ARROW: _read_arrow}.get(kind_of_file(path), _read_parquet)
    try:
        table = reader(path, most)
        columns = [_values_of(column) for column in table.columns]
    except pyarrow.ArrowException as error:
        reason = str(error).partition("\n")[0]
        kind = kind_of_file(path)
        raise UserError(f"{path} is not a readable {kind} file ({reason}): write it again, or as .jsonl") from None
    for number, values in enumerate(zip(*columns, strict=True), start=1):
        yield f"row {number}", dict(zip(table.column_names, values, strict=True))


def _read_csv(path: Path, most: int | None) -> Any:
    """Returns the table of a CSV file, all of whose values are texts; a column without a name, as of an index, is left
    out."""
    import pyarrow
    from pyarrow import csv

    content = read_data(path)
    if not content.strip():
        return pyarrow.table({})
    parse = csv.ParseOptions(newlines_in_values=True)
    read = csv.ReadOptions(block_size=min(len(content), 2**31 - 1))
    names = csv.open_csv(io.BytesIO(content), read, parse).schema.names
    if len({*names}) < len(names):
        raise pyarrow.ArrowInvalid(f"two of the columns {', '.join(names)} have one name; rename one")
    named = [name for name in names if name]
    convert = csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string()), include_columns=named)
    return csv.read_csv(io.BytesIO(content), read, parse, convert).slice(0, most)


def _read_parquet(path: Path, most: int | None) -> Any:
    """Returns the table of a Parquet file, or its first rows."""
    import pyarrow
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        if most is None:
            return file.read()
        return pyarrow.Table.from_batches(islice(file.iter_batches(most), 1), file.schema_arrow)


def _read_arrow(path: Path, most: int | None) -> Any:
    """Returns the table of an Arrow file or of a stream, as datasets writes it, or its first rows."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        with (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(file) as rows:
            return rows.read_all().slice(0, most)


def _values_of(column: Any) -> list[Any]:
    """Returns the values of a column of Arrow. Bytes that are UTF-8 become texts, wherever they stand."""
    import pyarrow

    try:
        values = column.to_pylist()
    except UnicodeDecodeError:  # texts that some program wrote in another encoding
        column = column.cast(pyarrow.large_binary())
        values = column.to_pylist()
    except (ValueError, OverflowError):  # nanoseconds, years after 9999 and their like, which Python's types lack
        values = column.cast(pyarrow.large_string()).to_pylist()
    return [_with_texts(value) for value in values] if "binary" in str(column.type) else values


def _with_texts(value: Any) -> Any:
    """Returns a value with texts in the place of bytes that are UTF-8."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    if isinstance(value, dict):
        return {name: _with_texts(inner) for name, inner in value.items()}
    return [_with_texts(inner) for inner in value] if isinstance(value, list | tuple) else value
