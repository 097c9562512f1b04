"""Reads the entries of data files (JSON, CSV, Parquet, text), each with its place for messages."""

import csv
import datetime
import decimal
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.data_files import ARROW, KINDS, PACKED, TABLES, is_packed, kind_of_file, read_data
from rlhf_spmd.files.reading import no_memory, why_no_file
from rlhf_spmd.model.texts.written import ASSISTANT, LEARNED, SAID

CONVERSATIONS = ("messages", "conversations", "conversation")  # columns of whole conversations
CONVERSATION, TEXT = CONVERSATIONS[0], "text"  # that hold a prompt and a response
SOURCE = "data_source"  # a column: where a row comes from
INSTEAD = {"prompt": CONVERSATIONS}  # the columns of which the first is read where this one is missing
SYSTEMS = ("system", "system_prompt")  # columns with the first message of a conversation that has none
# of ShareGPT's messages, whose other roles are called as here
ROLES = {"human": "user", "gpt": ASSISTANT, "observation": "tool"}
CALLING, ANSWERING = ("function_call", "tool_call"), ("function", "tool_response")  # other names of roles
Message = dict[str, Any]  # `role`, and `content` unless it says something else; what else it has is for the template
Record = dict[str, Any]  # column -> value
FLOAT32_MAX = 3.4028234663852886e38


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
        fix = fix.replace("add it", "give it a value", 1)
        return UserError(f"{where}: the value of {key!r} is null: {fix}")
    there = ", ".join(map(repr, record)) or "none"
    return UserError(f"{where}: no key {key!r} (keys there: {there}): {fix}")


def read_records(
    path: Path, key: str, others: Sequence[str] | None = None, *, most: int | None = None
) -> list[tuple[str, Record]]:
    """Yields (place, columns) of every entry, which all have the column `key` or one of `others` (None: those of
    INSTEAD); place is `line 7` or `row 7`, counted from 1. Raises UserError naming file and place.

    most: only so many entries are read, the first ones.
    """
    kind = kind_of_file(path)
    if kind not in KINDS:
        named = f"{kind or '(none)'!r}" + f" before {PACKED}" * is_packed(path)
        raise UserError(f"{path}: unknown extension {named}: use one of {', '.join(KINDS)}")
    if kind in TABLES and is_packed(path):
        raise UserError(f"{path}: files of {kind} are not read compressed: unpack it (gunzip), and name that file")
    if why := why_no_file(path):
        raise UserError(f"prompt file {path} {why}")
    try:
        rows = READERS[kind](path, key, others_of(key, ()) if others is None else others, most)
        return list(islice(rows, most))
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror or error}") from error
    except MemoryError:
        raise no_memory(path) from None


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
    is_number = isinstance(value, int | float | decimal.Decimal) and not isinstance(value, bool)
    if not is_number or not abs(value) <= FLOAT32_MAX:
        kind = str(value) if isinstance(value, float) else kind_of(value)
        raise UserError(f"{where}: the value of {key!r} is {kind}, not a finite number")
    return float(value)


def messages_of(where: str, record: Record, key: str) -> list[Message]:
    """Returns a column that must be a conversation, each message with `role` and `content` as text. Keys that are null
    are left out, as transformers does. Raises UserError."""
    if not isinstance(record[key], list):
        raise UserError(f"{where}: the value of {key!r} is {kind_of(record[key])}, not a list of messages")
    if not record[key]:
        raise UserError(f"{where}: {key!r} has no message")
    return [_message(f"{where}: message {number} of {key!r}", one) for number, one in enumerate(record[key], start=1)]


def with_system(where: str, record: Record, messages: list[Message]) -> list[Message]:
    """Returns a conversation with the row's column of SYSTEMS as its first message, if it has one and the conversation
    has none. Raises UserError if it has another one."""
    if (name := system_of(record)) is None:
        return messages
    said = [message.get("content", "").strip() for message in messages if message["role"] in ("system", "developer")]
    if not said:
        return [{"role": "system", "content": record[name]}, *messages]
    if record[name].strip() not in said:
        raise UserError(f"{where}: {name!r} is not what the conversation's own system message says: remove one of them")
    return messages


def system_of(record: Mapping[str, Any]) -> str | None:
    """Returns the name of the column with a system message, if the row has one."""
    return next((name for name in SYSTEMS if isinstance(record.get(name), str) and record[name].strip()), None)


def is_learned(where: str, message: Message) -> bool:
    """Returns whether a message is learned: it is the assistant's, and none of its keys of LEARNED is 0. Raises
    UserError for values other than 0 and 1."""
    if message["role"] != ASSISTANT:
        return False
    wrong = next((name for name in LEARNED if message.get(name, 1) not in (0, 1)), None)
    if wrong is not None:
        raise UserError(
            f"{where}: {message[wrong]!r} is not a {wrong!r} of a message: write 1 if it is learned, 0 if not"
        )
    return all(message.get(name, 1) for name in LEARNED)


def is_said(message: Message) -> bool:
    """Returns whether a message of the assistant says anything."""
    return any(value.strip() if isinstance(value, str) else value for value in map(message.get, SAID))


def _message(where: str, value: Any) -> Message:
    """Returns one message, also one of ShareGPT, with `from` and `value`."""
    message = {name: part for name, part in value.items() if part is not None} if isinstance(value, dict) else {}
    if "from" in message and "role" not in message:
        role = message.pop("from")
        message = {"role": ROLES.get(role, role) if isinstance(role, str) else role} | message
        if "value" in message and "content" not in message:
            message["content"] = message.pop("value")
    if message.get("role") in CALLING:
        message |= {"role": ASSISTANT, "content": "", "function_call": message.pop("content", None)}
    elif message.get("role") in ANSWERING:
        message["role"] = "tool"
    calls = message.pop("function_call", None) or message.get("tool_calls")
    if calls := _from_text(calls, list | dict):
        message["tool_calls"] = [_call(where, call) for call in (calls if isinstance(calls, list) else [calls])]
    elif "tool_calls" in message:
        del message["tool_calls"]
    if isinstance(message.get("content"), list):
        message["content"] = "".join(_part(where, part) for part in message["content"])
    wrong = next((name for name in ("role", "content") if not isinstance(message.get(name), str)), None)
    if wrong == "content" and "content" not in message and message["role"] == ASSISTANT and is_said(message):
        return message  # it calls tools
    if wrong is not None:
        what = f"has {kind_of(message[wrong])} as {wrong!r}" if wrong in message else f"has no {wrong!r}"
        if not isinstance(value, dict):
            what = f"is {kind_of(value)}"
        elif wrong in value and value[wrong] is None:
            what = f"has null as {wrong!r}"
        raise UserError(f'{where} {what}: write {{"role": "...", "content": "..."}} with two strings')
    return message


def _call(where: str, call: Any) -> Message:
    """Returns a call of a tool as chat templates take it, also of its inner object alone. JSON text becomes objects."""
    own = call if isinstance(call, dict) else {}
    if "function" not in own:
        function = {name: own[name] for name in ("name", "arguments") if name in own}
        own = {"type": "function"} | {name: part for name, part in own.items() if name not in function}
        own["function"] = function
    function = own["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(
            f'{where} has a call of a tool that is not an object such as {{"name": "f", "arguments": {{"x": 1}}}}, or '
            "JSON text of one: correct it"
        )
    return own | {"function": function | {"arguments": _from_text(function.get("arguments", {}), dict)}}


def _from_text(value: Any, kind: Any) -> Any:
    """Returns what JSON text says, if that is of this kind, else the value itself; empty text is an empty object."""
    try:
        found = json.loads(value or "{}") if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, kind) else value


def _part(where: str, part: Any) -> str:
    """Returns the text of one part of a message."""
    if isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") in ("text", None):
        return part["text"]
    found = f"of type {part.get('type')!r}" if isinstance(part, dict) else f"that is {kind_of(part)}"
    raise UserError(
        f'{where} has a part {found}, and only {{"type": "text", "text": "..."}} can be read: the models here read text'
    )


def without_nulls(value: Any) -> Any:
    """Returns a value without keys that are null: Arrow gives all objects of a column the same keys."""
    if isinstance(value, dict):
        return {name: without_nulls(part) for name, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def conversation_of(columns: Mapping[str, Any], key: str) -> list[Message] | None:
    """Returns the messages before the answer, if the prompt of a row is a conversation. columns: of a data set that was
    read, in which a text beside a conversation is kept. key: the column of prompts."""
    name = first_of(columns, (key, *INSTEAD.get(key, ())))
    if name is None or not isinstance(columns[name], list):
        return None
    messages = with_system("the data set", dict(columns), messages_of("the data set", dict(columns), name))
    return messages[:-1] if messages[-1]["role"] == ASSISTANT else messages


def _read_lines(path: Path, key: str, others: Sequence[str], most: int | None) -> Iterator[tuple[str, Record]]:
    for place, line in _lines(path, most):
        yield place, {key: line}


def _lines(path: Path, most: int | None) -> Iterator[tuple[str, str]]:
    """Yields numbered lines. Blank lines at the end of the file are ignored; elsewhere they are an error."""
    content = _content(path, most).rstrip(b"\r\n\t ")
    for number, line in enumerate(content.split(b"\n") if content else [], start=1):
        try:
            yield f"line {number}", line.removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}, line {number}: byte {error.start + 1} is not UTF-8: save the file as UTF-8"
            ) from None


def _content(path: Path, most: int | None = None) -> bytes:
    return read_data(path, most).removeprefix(b"\xef\xbb\xbf")


def _text(path: Path) -> str:
    """Returns the whole file as text. Raises UserError naming the line that is not UTF-8."""
    content = _content(path)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        raise UserError(f"{path}, line {line}: byte {column} is not UTF-8: save the file as UTF-8") from None


def _read_jsonl(path: Path, key: str, others: Sequence[str], most: int | None) -> Iterator[tuple[str, Record]]:
    form = f'each line is one object such as {{"{key}": "..."}}'
    for place, line in _lines(path, most):
        where = f"{path}, {place}"
        if not line.strip():
            raise UserError(f"{where}: the line is blank: remove it")
        try:
            row = _from_json(where, line, form)
        except UserError:
            if _is_json(path):
                raise UserError(f"{path} is one JSON value over several lines, and {form}: write its rows so") from None
            raise
        yield place, _row(where, row, key, others)


def _is_json(path: Path) -> bool:
    """Returns whether a whole file is one JSON value."""
    try:
        json.loads(_text(path))
    except (ValueError, RecursionError):
        return False
    return True


def _read_json(path: Path, key: str, others: Sequence[str], most: int | None) -> Iterator[tuple[str, Record]]:
    """Yields the objects of a list; a file that does not begin with a bracket has an object on each line."""
    text = _text(path)
    if not text.lstrip().startswith("["):
        yield from _read_jsonl(path, key, others, most)
        return
    rows = _from_json(str(path), text, f'the file is a list of objects such as {{"{key}": "..."}}')
    for number, row in enumerate(rows, start=1):
        yield f"row {number}", _row(f"{path}, row {number}", row, key, others)


def _from_json(where: str, text: str, form: str) -> Any:
    """Parses JSON. Raises UserError.

    form: how it is to be written.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"{where}, line {error.lineno}" if "\n" in text else where
        raise UserError(f"{line}: not valid JSON at column {error.colno} ({error.msg}): {form}") from None
    except ValueError:
        limit = f"{sys.get_int_max_str_digits():,}"
        raise UserError(f"{where}: a whole number has more than {limit} digits: write it as a string") from None
    except RecursionError:
        raise UserError(f"{where}: lists or objects are nested too deep: write them as a string") from None


def _row(where: str, row: Any, key: str, others: Sequence[str]) -> Record:
    """Reads a row of JSON. Raises UserError if it is not one."""
    if not isinstance(row, dict):
        raise UserError(f'{where}: {kind_of(row)}, not an object: write {{"{key}": "..."}}')
    _check_has(where, row, key, others)
    return row


def _read_csv(path: Path, key: str, others: Sequence[str], most: int | None) -> Iterator[tuple[str, Record]]:
    """Yields rows of texts under the names of the first line; a column without a name, as of an index, is left out."""
    text = _text(path)
    before = csv.field_size_limit(max(len(text), 1))
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header, *rows = [line for line in lines if line] or [[]]
    except csv.Error as error:
        where = f"{path}, line {lines.line_num}"
        raise UserError(
            f"{where}: not valid CSV ({error}): put fields with quotes in quotes, and double these"
        ) from None
    finally:
        csv.field_size_limit(before)
    if twice := next((name for name in header if name and header.count(name) > 1), None):
        raise UserError(f"{path}, line 1: two columns are called {twice!r}: rename one")
    for number, values in enumerate(rows, start=1):
        where = f"{path}, row {number}"
        if len(values) != len(header):
            fix = "put fields with commas in quotes"
            raise UserError(f"{where}: {len(values)} fields under {len(header)} names of columns: {fix}")
        record = {name: value for name, value in zip(header, values, strict=True) if name}
        _check_has(where, record, key, others)
        yield f"row {number}", record


def _read_table(path: Path, key: str, others: Sequence[str], most: int | None) -> Iterator[tuple[str, Record]]:
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{path}: reading Parquet and Arrow needs pyarrow: pip install pyarrow") from None
    try:
        names, table = (_of_arrow if kind_of_file(path) == ARROW else _of_parquet)(path, most)
        if key not in names and not any(other in names for other in others):
            raise UserError(
                f"{path}: no column {key!r} (columns there: {', '.join(map(repr, names))}): add it, or set data.key"
            )
        columns = [] if table is None else [_values_of(column) for column in table.columns]
    except pyarrow.ArrowException as error:
        reason = str(error).partition("\n")[0]
        kind = kind_of_file(path)[1:].capitalize()
        raise UserError(f"{path} is not a readable {kind} file: {reason}") from None
    for number, values in enumerate(zip(*columns, strict=True), start=1):
        record = dict(zip(names, values, strict=True))
        _check_has(f"{path}, row {number}", record, key, others)
        yield f"row {number}", record


def _of_parquet(path: Path, most: int | None) -> tuple[list[str], Any]:
    """Returns the names of the columns, and a table of the first rows; None: there are none."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        return file.schema_arrow.names, file.read() if most is None else next(file.iter_batches(most), None)


def _of_arrow(path: Path, most: int | None) -> tuple[list[str], Any]:
    """Returns the names of the columns, and a table of the first rows, of a stream, as datasets writes it, or a
    file."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        with (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(file) as rows:
            table = rows.read_all().slice(0, most)
    return table.schema.names, table


def _values_of(column: Any) -> list[Any]:
    """Returns the values of a column of Parquet. Bytes that are UTF-8 become texts, wherever they stand."""
    import pyarrow

    try:
        values = column.to_pylist()
    except UnicodeDecodeError:  # texts that some program wrote in another encoding
        column = column.cast(pyarrow.large_binary())
        values = column.to_pylist()
    except (ValueError, OverflowError):  # nanoseconds, years after 9999 and their like, which Python's types lack
        values = column.cast(pyarrow.large_string()).to_pylist()
    is_plain = not any(word in str(column.type) for word in ("binary", "halffloat"))
    return values if is_plain else [_plain(value) for value in values]


def _plain(value: Any) -> Any:
    """Returns a value with texts in the place of bytes that are UTF-8, and numbers of Python in the place of
    numpy's."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value.item() if hasattr(value, "item") else value


READERS = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".txt": _read_lines,
    **dict.fromkeys(TABLES, _read_table),
}
KINDS_OF_VALUES = {
    dict: "an object",
    list: "a list",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    bytes: "bytes that are not UTF-8",
    decimal.Decimal: "a decimal number",
    type(None): "null",
    datetime.date: "a date",
    datetime.datetime: "a date with a time",
    datetime.time: "a time of day",
    datetime.timedelta: "a length of time",
}


def _check_has(where: str, record: Record, key: str, others: Sequence[str]) -> None:
    """Raises UserError for a row that has none of these columns."""
    if first_of(record, (key, *others)) is None:
        null = next((name for name in (key, *others) if name in record), key)
        raise lacks(where, record, null, "add it, or set data.key")


def kind_of(value: object) -> str:
    """Returns the type of a value of a data file, with its article."""
    return KINDS_OF_VALUES.get(type(value), f"a value of the type {type(value).__name__}")
