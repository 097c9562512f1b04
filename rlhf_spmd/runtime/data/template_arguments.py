"""What a row gives the chat template beside its messages: the columns `tools` and `chat_template_kwargs`, as in TRL."""

import json
from collections.abc import Mapping
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.option_values import check_template_kwargs
from rlhf_spmd.runtime.data.messages import system_column
from rlhf_spmd.runtime.data.readers import Record, kind_of

TOOLS, KWARGS = "tools", "chat_template_kwargs"  # columns


def arguments_of(where: str, record: Record, of_all: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments by name, those that the row has, or an empty mapping. Columns may hold JSON text, as data
    sets often store them. Raises UserError.

    of_all: chat_template_kwargs of all rows.
    where: file and place.
    """
    given: dict[str, Any] = {}
    tools = _value(where, record, TOOLS)
    if tools is not None:
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise UserError(f"{where}: the value of {TOOLS!r} is not a list of objects, which describe a tool each")
        given[TOOLS] = tools
    own = _value(where, record, KWARGS)
    if own is not None:
        if not isinstance(own, dict):
            raise UserError(f"{where}: the value of {KWARGS!r} is {kind_of(own)}, not an object")
        own = {name: value for name, value in own.items() if value is not None}
        check_template_kwargs(f"{where}: {KWARGS!r}", own)
    if kwargs := {**of_all, **(own or {})}:
        given[KWARGS] = kwargs
    return given


def names_of(record: Record, of_all: Mapping[str, Any]) -> list[str]:
    """Returns the arguments that a row has for a template, by name, whatever their values mean."""
    given = {TOOLS: record.get(TOOLS), KWARGS: record.get(KWARGS) or of_all}
    return [
        *(name for name, value in given.items() if value not in (None, "", {})),
        *filter(None, [system_column(record)]),
    ]


def _value(where: str, record: Record, column: str) -> Any:
    """Returns a column, or what its JSON text says; None: it is missing or empty."""
    value = record.get(column)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: the value of {column!r} is text that is not JSON ({error})") from None
