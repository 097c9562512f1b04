"""The fields of a calibration, from the docstrings of its classes, for docs/forecasts.md."""

import inspect
import re

from bench.columns import Columns

FIELD = re.compile(
    r"^([a-z_, ]+): (.*(?:\n    .*)*)", re.MULTILINE
)  # "name: meaning", whose further lines are indented
COLUMNS: Columns = {"field": lambda row: row["field"], "meaning": lambda row: row["meaning"]}


def fields(*classes: type) -> tuple[Columns, list[dict]]:
    """Returns a row for each field of these classes."""
    texts = [inspect.getdoc(one) or "" for one in classes]
    found = [found for text in texts for found in FIELD.findall(text)]
    return COLUMNS, [
        {"field": ", ".join(f"`{name}`" for name in names.split(", ")), "meaning": " ".join(text.split()).rstrip(".")}
        for names, text in found
    ]
