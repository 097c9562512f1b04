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
    for name, kind, form in ((TOOLS, list, "a list of objects"), (KWARGS, dict, "an object")):
        value = record.get(name)
        if isinstance(value, str):
            try:
                value = json.loads(value) if value.strip() else None
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: the value of {name!r} is text that is not JSON ({error})") from None
        if value is None:
            continue
        if not isinstance(value, kind) or not all(isinstance(part, dict if kind is list else str) for part in value):
            raise UserError(f"{where}: the value of {name!r} is {kind_of(value)}, not {form}")
        given[name] = value
    own = {name: value for name, value in given.pop(KWARGS, {}).items() if value is not None}
    check_template_kwargs(f"{where}: {KWARGS!r}", own)
    return given | ({KWARGS: kwargs} if (kwargs := {**of_all, **own}) else {})


def names_of(record: Record, of_all: Mapping[str, Any]) -> list[str]:
    """Returns the arguments that a row has for a template, by name, whatever their values mean."""
    given = {TOOLS: record.get(TOOLS), KWARGS: record.get(KWARGS) or of_all}
    names = [name for name, value in given.items() if value not in (None, "", {})]
    return [*names, *filter(None, [system_column(record)])]
