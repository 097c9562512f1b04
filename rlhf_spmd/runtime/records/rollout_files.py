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


def other_names(columns: Sequence[str], own: Iterable[str]) -> dict[str, str]:
    """Returns, for columns of the data set whose name is that of one of a run's own, what they are called in
    rollouts."""
    renamed: dict[str, str] = {}
    run_names = {*own}
    taken = run_names.union(columns)
    for name in columns:
        if name in run_names:
            other = name
            while other in taken:
                other = f"data.{other}"
            renamed[name] = other
            taken.add(other)
    return renamed


def types_of(rows: Sequence[Record], names: Sequence[str]) -> Types:
    """Returns the types of the columns of a data set."""
    return {name: _type_of(finite([row.get(name) for row in rows])) for name in names}


def _type_of(values: list[Any]) -> Any:
    """Returns the Arrow type that holds these values, none of which it changes; None if there is none."""
    import pyarrow

    try:
        array = pyarrow.array(values)
    except (pyarrow.ArrowException, ValueError, TypeError, OverflowError):
        return None
    has_type = array.to_pylist() == values and "struct<>" not in str(array.type)
    return array.type if has_type else None


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
    renamed: columns of the data set with other names (other_names).
    """
    if form == "jsonl":
        with path.open("w", encoding="utf-8") as file:
            for added, record in rows:
                columns = {renamed.get(name, name): value for name, value in finite(record).items()}
                file.write(json_text(added | columns) + "\n")
        return
    import pyarrow
    from pyarrow import parquet

    whole, fields, arrays = list(rows), [], []

    def add(name: str, kind: Any, values: Iterable[Any], metadata: Mapping[bytes, bytes] | None = None) -> None:
        name = name.encode(errors="backslashreplace").decode()  # a reward function may name its numbers anything
        fields.append(pyarrow.field(name, kind, metadata=metadata))
        arrays.append(pyarrow.array(values, type=kind))

    for name, kind in own.items():
        add(name, OWN_TYPES[kind](pyarrow), (added.get(name) for added, _ in whole))
    for name, kind in types.items():
        shown = renamed.get(name, name)
        values = [finite(record.get(name)) for _, record in whole]
        if kind is None:
            texts = (None if value is None else json_text(value) for value in values)
            add(shown, pyarrow.string(), texts, AS_JSON)
        else:
            add(shown, kind, values)
    parquet.write_table(pyarrow.Table.from_arrays(arrays, schema=pyarrow.schema(fields)), path)


def read_part(path: Path) -> Iterator[Record]:
    """Yields the rows of a part. Raises UserError."""
    records = [record for _, record in read_records(path, "prompt")]
    if path.suffix != ".parquet":
        yield from records
        return
    from pyarrow import parquet

    texts = [field.name for field in parquet.read_schema(path) if (field.metadata or {}).items() >= AS_JSON.items()]
    for number, record in enumerate(records, start=1):
        try:
            yield record | {name: json.loads(record[name]) for name in texts if record[name] is not None}
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(
                f"{path}, row {number}: a column of JSON holds none ({error}); leave the file out"
            ) from None
