"""The values of rows as the text of a table's cells."""

from collections.abc import Mapping
from string import Formatter
from typing import Any

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "MB": 1e6, "GB": 1e9, "ms": 1e-3, "us": 1e-6, "points": 1e-2}
NONE = "-"


class Cells(Formatter):
    """Format strings of a row's values. Beside Python's formats there are: `code` (between backquotes), `yes|no` (words
    for true and false), and a unit before a format, such as `GiB .1f`. Lists are written with commas, and mappings as
    names with values. What a row does not have is a dash."""

    def get_value(self, key: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        return kwargs.get(key)

    def get_field(self, field_name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        try:
            return super().get_field(field_name, args, kwargs)
        except (KeyError, TypeError):  # a part of what the row does not have
            return None, field_name

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
    return CELLS.vformat(template, (), row)
