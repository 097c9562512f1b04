"""Calls a reward function with the parameters that it was written for: those of this program, TRL, verl or OpenRLHF.

The style is told by the names of the parameters:

    (prompts, responses, ...)                                     this program
    (prompts, completions, completion_ids, **columns)             TRL; conversations get conversations
    (data_source, solution_str, ground_truth, extra_info)         verl; called once for each response
    (queries, prompts, labels)                                    OpenRLHF; a query is a prompt with its response

Any further parameter is a column of the data set, as a list with one value for each response. The result is one number
for each response, or None where the function does not apply; or a dict with numbers of that kind, for the log.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_spmd.errors import UserError

SCORE_KEYS = ("score", "rewards", "scores")  # of dicts that functions return, the first one counts
EXTRA_KEYS = ("extra_logs",)  # of dicts: more numbers for the log
TAKEN = ("prompts", "responses")  # no columns, for a function that takes everything by name


@dataclass(frozen=True, slots=True)
class Scored:
    """Rows to score. columns: of the data set, without those that hold prompts as text or responses. first: the number
    of the first row, where these are some of the rows of a rank."""

    prompts: Sequence[str]
    responses: Sequence[str]
    tokens: Sequence[Sequence[int]] = ()  # of each response
    columns: Sequence[Mapping[str, Any]] = ()  # of each row
    first: int = 0

    def __len__(self) -> int:
        return len(self.prompts)

    def one(self, index: int) -> Scored:
        """The rows with only this one."""
        part = slice(index, index + 1)
        first = self.first + index
        return Scored(self.prompts[part], self.responses[part], self.tokens[part], self.columns[part], first)

    def column(self, name: str) -> list[Any]:
        return [row.get(name) for row in self.columns] if self.columns else [None] * len(self)

    def column_names(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.columns for name in row))


@dataclass(frozen=True, slots=True)
class Result:
    """What a function returned. logs: further numbers of each response."""

    scores: Any
    logs: Mapping[str, list[Any]] = field(default_factory=dict)


def style_of(function: Callable) -> str:
    """`own`, `trl`, `verl` or `openrlhf`."""
    try:
        names = set(inspect.signature(function).parameters)
    except ValueError:  # a builtin
        return "own"
    if "completions" in names:
        return "trl"
    if "solution_str" in names:
        return "verl"
    return "openrlhf" if "queries" in names else "own"


def call(function: Callable, rows: Scored) -> Result:
    """Calls a function of any style. Raises what it raises, and UserError for a dict without scores."""
    style = style_of(function)
    if style == "verl":
        return _each(function, rows)
    positional: tuple = ()
    if style == "own":
        positional, known = (list(rows.prompts), list(rows.responses)), {"completion_ids": list(map(list, rows.tokens))}
    elif style == "trl":
        known = {"completion_ids": list(map(list, rows.tokens)), **_conversations(rows)}
    else:
        labels = "label" if "label" in rows.column_names() else "labels"
        queries = [prompt + response for prompt, response in zip(rows.prompts, rows.responses, strict=True)]
        known = {"queries": queries, "prompts": list(rows.prompts), "labels": rows.column(labels)}
    found = _result(function(*positional, **_arguments(function, rows, known)))
    if not isinstance(found, Mapping):
        return Result(found)
    key = next((key for key in SCORE_KEYS if key in found), None)
    if key is None:
        raise UserError(f"it returned a dict with {', '.join(map(repr, found))}, and none of {', '.join(SCORE_KEYS)}")
    logs = {name: value for name, value in found.items() if name not in (*SCORE_KEYS, *EXTRA_KEYS)}
    for extra in EXTRA_KEYS:
        logs |= found.get(extra, {})
    return Result(found[key], {name: _listed(value, len(rows)) for name, value in logs.items()})


def _result(found: Any) -> Any:
    """What a function returned; what it will return if it is async."""

    async def awaited() -> Any:
        return await found

    return asyncio.run(awaited()) if inspect.isawaitable(found) else found


def _results(found: Sequence[Any]) -> Sequence[Any]:
    """What several calls returned; what they will return if they are async, all of them at once."""

    async def awaited() -> list[Any]:
        return await asyncio.gather(*found)

    return asyncio.run(awaited()) if found and all(map(inspect.isawaitable, found)) else found


def _conversations(rows: Scored) -> dict[str, list]:
    """Prompts and completions as TRL passes them: as conversations if the prompts of the data set are some."""
    messages = rows.column("prompt")
    messages = messages if any(isinstance(one, list) for one in messages) else rows.column("messages")
    if not all(isinstance(one, list) for one in messages):
        return {"prompts": list(rows.prompts), "completions": list(rows.responses)}
    completions = [[{"role": "assistant", "content": response}] for response in rows.responses]
    return {"prompts": messages, "completions": completions}


OF_ROWS = {  # what a style is given besides columns
    "own": ("completion_ids",),
    "trl": ("prompts", "completions", "completion_ids"),
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "openrlhf": ("queries", "prompts", "labels"),
}
POSITIONAL = {"own": 2}  # parameters that are given by their places


def needs(function: Callable) -> list[str]:
    """The columns of the data set without which a function cannot be called."""
    style = style_of(function)
    return [
        name
        for name, parameter in _parameters(function).items()
        if parameter.default is parameter.empty and name not in OF_ROWS[style]
    ]


def check_columns(function: Callable, columns: Sequence[str]) -> None:
    """Raises UserError if a function asks for a column that the data set does not have."""
    has_truth = "ground_truth" in columns or "reward_model" in columns
    lacking = [name for name in needs(function) if name not in columns]
    lacking += ["ground_truth"] if style_of(function) == "verl" and not has_truth else []
    if lacking:
        there = ", ".join(columns) or "there is none besides the prompts"
        raise UserError(
            f"it asks for {lacking[0]}, which is no column of the data set ({there}): add the column, or rename the "
            "parameter"
        )


def _parameters(function: Callable) -> dict[str, inspect.Parameter]:
    """The parameters that are given by name, without *args and **kwargs."""
    try:
        found = inspect.signature(function).parameters
    except ValueError:  # a builtin
        return {}
    named = list(found.items())[POSITIONAL.get(style_of(function), 0) :]
    return {name: one for name, one in named if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}


def _takes_all(function: Callable) -> bool:
    """Whether a function has **kwargs."""
    try:
        return any(one.kind is one.VAR_KEYWORD for one in inspect.signature(function).parameters.values())
    except ValueError:
        return False


def _arguments(function: Callable, rows: Scored, known: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments: what is known of rows, and columns; all of them for a function with **kwargs."""
    columns, parameters = rows.column_names(), _parameters(function)
    wanted = [name for name in columns if name in parameters or (_takes_all(function) and name not in TAKEN)]
    found = {name: rows.column(name) for name in wanted if name not in known}
    return found | {name: value for name, value in known.items() if name in parameters or _takes_all(function)}


def _each(function: Callable, rows: Scored) -> Result:
    """verl's: one call for each response, which returns a number, or a dict with `score` and more numbers. Calls of an
    async function run concurrently."""
    parameters, made, scores, logs = _parameters(function), [], [], {}
    for index, response in enumerate(rows.responses):
        row = rows.columns[index] if rows.columns else {}
        model = row.get("reward_model")
        truth = model.get("ground_truth") if isinstance(model, Mapping) else row.get("ground_truth")
        known = {"solution_str": response, "ground_truth": truth}
        known |= {name: row.get(name) for name in ("data_source", "extra_info")}
        given = {name: value for name, value in (row | known).items() if name in parameters or _takes_all(function)}
        made.append(function(**given))
    for index, found in enumerate(_results(made)):
        if isinstance(found, Mapping):
            if "score" not in found:
                raise UserError(f"it returned a dict with {', '.join(map(repr, found))}, and no 'score'")
            for name, value in found.items():
                if name != "score":
                    logs.setdefault(name, [None] * len(rows))[index] = value
            found = found["score"]
        scores.append(found)
    return Result(scores, logs)


def _listed(value: Any, num: int) -> list[Any]:
    """Numbers for the log as a list: a tensor, a list, or one number for all rows."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, list | tuple) else [value] * num
