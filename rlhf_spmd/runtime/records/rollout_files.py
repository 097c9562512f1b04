"""The files of rollouts, in JSONL or Parquet: the ranks write them, the rollouts subcommand reads them. No torch, no
MPI.

Any value that JSON can hold comes back as it was. Parquet has one type for a column; a column without one, such as
texts beside numbers or objects with changing keys, holds texts of JSON there, and says so in its metadata. The types
follow from all rows of the data set, so all parts have the same ones.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.json_text import finite, json_text
from rlhf_spmd.runtime.data.readers import Record, read_records

DEEPEST = 20  # levels of a Parquet type
AS_JSON = {b"rlhf_spmd": b"JSON"}  # metadata of a column
OWN_TYPES = {  # of the columns that a run adds -> Arrow's
    "int": lambda arrow: arrow.int64(),
    "float": lambda arrow: arrow.float64(),
    "str": lambda arrow: arrow.string(),
    "ints": lambda arrow: arrow.list_(arrow.int64()),
    "floats": lambda arrow: arrow.list_(arrow.float64()),
    "turns": lambda arrow: arrow.list_(
        arrow.struct({"model": arrow.string(), **dict.fromkeys(("calls", "answers"), arrow.list_(arrow.string()))})
    ),
}
Types = Mapping[str, Any]  # column of the data set -> its Arrow type; None: there is none


def pyarrow_modules() -> tuple[Any, Any]:
    """Imports pyarrow and its module for Parquet. Raises UserError if they are missing."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError("rollouts.format=parquet needs pyarrow: pip install pyarrow, or use jsonl") from None
    return pyarrow, parquet


def other_names(columns: Iterable[str], own: Iterable[str]) -> dict[str, str]:
    """Returns, for columns of the data set whose name is that of one of a run's own, or not text (half a surrogate
    pair), what they are called in rollouts."""
    columns, own = list(columns), {*own}
    taken, found = own | {*columns}, {}
    for name in columns:
        other = name.encode(errors="backslashreplace").decode()
        if other == name and name not in own:
            continue
        while other in taken:
            other = f"data.{other}"
        found[name] = other
        taken.add(other)
    return found


def types_of(parts: Iterable[Sequence[Record]], names: Sequence[str]) -> Types:
    """Returns the types of the columns of a data set. parts: of its rows, some at a time."""
    arrow, _ = pyarrow_modules()
    found: dict[str, Any] = dict.fromkeys(names, arrow.null())
    for rows in parts:
        for name in [name for name, known in found.items() if known is not None]:
            kind = _type_of(arrow, [row.get(name) for row in rows])
            if kind != arrow.null():
                found[name] = kind if found[name] in (arrow.null(), kind) else None
    return found


def _type_of(arrow: Any, values: list[Any]) -> Any:
    """Returns the Arrow type that holds these values, none of which it changes; None if there is none."""
    try:
        array = arrow.array(values)
    except (arrow.ArrowException, ValueError, TypeError, OverflowError):
        return None
    kind, back = array.type, array.to_pylist()
    if kind == arrow.float64() and not any(isinstance(value, bool) for value in values):
        is_same = all(one == other or one != one for one, other in zip(values, back, strict=True))  # 1 beside 1.5
    else:
        is_same = json.dumps(values) == json.dumps(back)
    is_deep = str(kind).count("<") > DEEPEST  # readers refuse types that are nested deeper than some limit
    return kind if is_same and not is_deep and "struct<>" not in str(kind) else None


def write_part(
    path: Path,
    rows: Iterator[tuple[Record, Record]],
    form: str,
    own: Mapping[str, str],
    types: Types,
    renamed: Mapping[str, str],
) -> None:
    """Writes rows: what the run adds to each, and its columns of the data set. Raises OSError.

    form: `jsonl` or `parquet`.
    own, types: of both, for Parquet (OWN_TYPES, types_of).
    renamed: from other_names.
    """
    if form == "jsonl":
        with path.open("w", encoding="utf-8") as file:
            for added, record in rows:
                columns = {renamed.get(name, name): finite(one) for name, one in record.items()}
                file.write(json_text(added | columns) + "\n")
        return
    arrow, parquet = pyarrow_modules()
    whole, fields, arrays = list(rows), [], []

    def add(name: str, kind: Any, values: Iterable[Any], metadata: Mapping[bytes, bytes] | None = None) -> None:
        name = name.encode(errors="backslashreplace").decode()  # a reward function may name its numbers anything
        fields.append(arrow.field(name, kind, metadata=metadata))
        arrays.append(arrow.array(values, type=kind))

    for name, kind in own.items():
        add(name, OWN_TYPES[kind](arrow), (added.get(name) for added, _ in whole))
    for name, kind in types.items():
        values = [finite(record.get(name)) for _, record in whole]
        if kind is None:
            texts = (None if value is None else json_text(value) for value in values)
            add(renamed.get(name, name), arrow.string(), texts, AS_JSON)
        else:
            add(renamed.get(name, name), kind, values)
    parquet.write_table(arrow.Table.from_arrays(arrays, schema=arrow.schema(fields)), path)


def read_part(path: Path) -> Iterator[Record]:
    """Yields the rows of a part. Raises UserError."""
    records = [record for _, record in read_records(path, "prompt")]
    if path.suffix != ".parquet":
        yield from records
        return
    _, parquet = pyarrow_modules()
    texts = [field.name for field in parquet.read_schema(path) if (field.metadata or {}).items() >= AS_JSON.items()]
    for number, record in enumerate(records, start=1):
        try:
            yield record | {name: json.loads(record[name]) for name in texts if record[name] is not None}
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(
                f"{path}, row {number}: a column of JSON holds none ({error}); leave the file out"
            ) from None
