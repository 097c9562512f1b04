"""Numbers of rows as text: format strings for the cells of tables and for the numbers that documents quote."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median
from string import Formatter
from typing import Any

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "MB": 1e6, "GB": 1e9, "ms": 1e-3, "us": 1e-6, "points": 1e-2}
NONE = "-"
ROWS = ""  # of a group: the name of its rows
SUMMARIES: dict[str, Callable[[list], Any]] = {
    **{"min": min, "max": max, "mean": fmean, "median": median, "sum": sum, "all": list},
    "count": lambda values: sum(map(bool, values)),
}


class Row(dict):
    """A row whose missing values are computed by VALUES (bench/columns.py) or summarise the rows of a group."""

    values: dict[str, Callable[[Mapping], Any]] = {}

    def __missing__(self, key: Any) -> Any:
        if key in self.values:
            return self.values[key](self)
        if ROWS in self and str(key).partition(" ")[0] in SUMMARIES:
            return CELLS.value(key, self)
        raise KeyError(key)


class Cells(Formatter):
    """Format strings of a row's values. Beside Python's formats there are: `code` (between backquotes), `yes|no` (words
    for true and false), and a unit before a format, such as `GiB .1f`. Lists are written with commas, and mappings as
    names with values. What a row does not have is a dash.

    A field may be a ratio (`{planner[iteration_s] / flattening[iteration_s]:.2f}`), a sum (` + `), what a ratio is
    above one (`gain planner[iteration_s] / ...`), a size without its sign (`abs error`), or, of a group, a summary of
    its rows (`{max error}`, `{mean abs error}`, `{count}`, `{count ok}`; `{all ratio}` lists them).
    """

    def value(self, field: str, row: Mapping[str, Any]) -> Any:
        """Returns the value of a field; None for what the row, or a part of it, does not have."""
        word, _, rest = field.partition(" ")
        if word in SUMMARIES and ROWS in row:
            values = [self.value(rest, one) if rest else True for one in row[ROWS]]
            known = [value for value in values if value is not None]
            return SUMMARIES[word](known) if known or word == "count" else None
        if rest and word in ("abs", "gain"):
            value = self.value(rest, row)
            return value if value is None else abs(value) if word == "abs" else value - 1
        for sign in (" / ", " + "):
            if sign in field:
                first, second = (self.value(part, row) for part in field.split(sign, 1))
                if first is None or second is None or (sign == " / " and not second):
                    return None
                return first / second if sign == " / " else first + second
        try:
            return super().get_field(field, (), row)[0]
        except (KeyError, TypeError):
            return None

    def get_value(self, key: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        return kwargs[key]

    def get_field(self, field_name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        return self.value(field_name, kwargs), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None or value == "":
            return NONE
        if isinstance(value, list | tuple):
            return ", ".join(self.format_field(one, format_spec) for one in value)
        if isinstance(value, dict):
            return ", ".join(f"{name} {self.format_field(one, format_spec)}" for name, one in value.items())
        if format_spec == "code":
            return f"`{value}`"
        if "|" in format_spec:
            return format_spec.split("|")[0 if value else 1]
        unit, _, spec = format_spec.rpartition(" ")
        return format(value / UNITS[unit] if unit else value, spec)


CELLS = Cells()


def cell(template: str, row: Mapping[str, Any]) -> str:
    """Returns the text of a cell."""
    return CELLS.vformat(template, (), Row(row))


def number(field: str, row: Mapping[str, Any]) -> Any:
    """Returns the value of a field of a row or a group."""
    return CELLS.value(field, Row(row))


def matching(rows: Iterable[Mapping], where: Mapping[str, Any]) -> list[Row]:
    """Returns the rows with these values. A list: any of them; true or false: whether there is a value."""

    def fits(row: Row, name: str, wanted: Any) -> bool:
        value = number(name, row)
        if isinstance(wanted, bool):
            return bool(value) is wanted
        return value in wanted if isinstance(wanted, list) else value == wanted

    return [row for row in map(Row, rows) if all(fits(row, *pair) for pair in where.items())]


def grouped(rows: Iterable[Mapping], by: Sequence[str], across: str = "{strategy}") -> list[Row]:
    """Joins the rows that have the same values of `by` -> a row for each group: what its first row has, its rows, for
    summaries, and by the text of `across` the rows with that text, joined likewise, so that `{planner[iteration_s]}` is
    a value of the planner's row."""
    return [_joined(group, across) for group in _groups(rows, lambda row: tuple(row.get(name) for name in by))]


def _joined(group: list[Row], across: str) -> Row:
    parts = {cell(across, part[0]): part for part in _groups(group, lambda row: cell(across, row))}
    return Row({**group[0], **{name: Row({**part[-1], ROWS: part}) for name, part in parts.items()}, ROWS: group})


def _groups(rows: Iterable[Mapping], key: Callable[[Row], Any]) -> list[list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in map(Row, rows):
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())
