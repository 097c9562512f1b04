"""Binds a reward function by the names of its parameters: those of this program, TRL, verl or OpenRLHF.

The parameter that receives the responses tells the program, whose words are passed first:

    responses       this program: prompts, responses
    completions     TRL: prompts, completions; as conversations where the prompt of the data set is one
    solution_str    verl: data_source, solution_str, ground_truth, extra_info; called once for each response
    queries         OpenRLHF: queries, prompts, labels; a query is a prompt with its response

and in all of them completion_ids, the tokens of each response. Any further parameter is a column of the data set, as a
list with one value for each response. Nothing is passed by place. The result is one number for each response, or None
where the function does not apply; or a dict with numbers of that kind, for the log.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.option_suggestions import did_you_mean
from rlhf_spmd.runtime.data.messages import conversation_of

SCORE_KEYS = ("score", "rewards", "scores")  # of dicts that functions return, the first one counts
EXTRA = "extra_logs"  # of dicts: more numbers for the log


@dataclass(frozen=True, slots=True)
class Scored:
    """Rows to score.

    columns: of the data set, without those that hold prompts as text or responses.
    first: the number of the first row, where these are some of the rows of a rank.
    key: the column of prompts.
    """

    prompts: Sequence[str]
    responses: Sequence[str]
    tokens: Sequence[Sequence[int]] = ()  # of each response
    columns: Sequence[Mapping[str, Any]] = ()  # of each row
    first: int = 0
    key: str = "prompt"

    def __len__(self) -> int:
        return len(self.prompts)

    def part(self, start: int, stop: int) -> Scored:
        """Returns some of the rows."""
        part, first = slice(start, stop), self.first + start
        return Scored(self.prompts[part], self.responses[part], self.tokens[part], self.columns[part], first, self.key)

    def as_json(self) -> dict[str, Any]:
        """Returns the rows as JSON can hold them, by the names of the fields."""
        texts = {"prompts": [*self.prompts], "responses": [*self.responses], "key": self.key, "first": self.first}
        return texts | {"tokens": [[*one] for one in self.tokens], "columns": [{**one} for one in self.columns]}

    @property
    def records(self) -> Sequence[Mapping[str, Any]]:
        """The columns of each row, also where the data set has none."""
        return self.columns or [{}] * len(self)

    def column(self, name: str) -> list[Any]:
        return [row.get(name) for row in self.records]


@dataclass(frozen=True, slots=True)
class Result:
    """What a function returned. logs: further numbers of each response."""

    scores: Any
    logs: Mapping[str, list[Any]] = field(default_factory=dict)


# ---- the words of each program: the values of a word for some rows, a list ------------------------------------------


def _prompts(rows: Scored) -> list[Any]:
    return [conversation_of(row, rows.key) or text for row, text in zip(rows.records, rows.prompts, strict=True)]


def _completions(rows: Scored) -> list[Any]:
    pairs = zip(rows.records, rows.responses, strict=True)
    return [[{"role": "assistant", "content": text}] if conversation_of(row, rows.key) else text for row, text in pairs]


def _queries(rows: Scored) -> list[str]:
    return [prompt + response for prompt, response in zip(rows.prompts, rows.responses, strict=True)]


def _truths(rows: Scored) -> list[Any]:
    models = [row.get("reward_model") for row in rows.records]
    truths = [model.get("ground_truth") if isinstance(model, Mapping) else None for model in models]
    return _first(truths, rows.column("ground_truth"))


def _first(values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    return [other if value is None else value for value, other in zip(values, others, strict=True)]


Word = Callable[[Scored], list[Any]]
IDS: dict[str, Word] = {"completion_ids": lambda rows: [list(tokens) for tokens in rows.tokens or [()] * len(rows)]}
WORDS: dict[str, dict[str, Word]] = {  # by the word that is the response
    "responses": {"prompts": lambda rows: [*rows.prompts], "responses": lambda rows: [*rows.responses], **IDS},
    "completions": {"prompts": _prompts, "completions": _completions, **IDS},
    "solution_str": {
        "data_source": lambda rows: rows.column("data_source"),
        "solution_str": lambda rows: [*rows.responses],
        "ground_truth": _truths,
        "extra_info": lambda rows: rows.column("extra_info"),
        **IDS,
    },
    "queries": {
        "queries": _queries,
        "prompts": lambda rows: [*rows.prompts],
        "labels": lambda rows: _first(rows.column("labels"), rows.column("label")),
        **IDS,
    },
}
OF_EACH = "solution_str"  # such a function is called once for each response
COLUMNS_TOO = ("data_source", "extra_info", "ground_truth", "labels")  # words that are the columns of these names
READ_BY_WORDS = ("reward_model", "label")  # columns that words of other names may be
ACCEPTED = "responses, completions (as in TRL), solution_str (verl) or queries (OpenRLHF: prompt with response)"
# What others call them: trlX's samples are prompt and response.
ELSEWHERE = {"samples": "queries", **dict.fromkeys(("output", "outputs", "texts", "generations"), "responses")}
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


# ---- binding --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bound:
    """A reward function, and the names by which it is called.

    receiver: the word that is the response.
    hidden: words that are columns, too, which the function does not get.
    """

    function: Callable
    receiver: str
    words: tuple[str, ...]
    columns: tuple[str, ...]
    hidden: tuple[str, ...] = ()

    def call(self, rows: Scored) -> Result:
        """Calls the function on these rows. Raises what it raises, and UserError for a dict without scores."""
        values = {name: rows.column(name) for name in self.columns}
        values |= {name: WORDS[self.receiver][name](rows) for name in self.words}
        if self.receiver != OF_EACH:
            return _of_all(_awaited([self.function(**values)])[0], len(rows))
        calls = [{name: values[name][row] for name in values} for row in range(len(rows))]
        return _of_each(_awaited([self.function(**arguments) for arguments in calls]))


def bind(function: Callable, columns: Sequence[str] | None = ()) -> Bound:
    """Reads the parameters of a function, once. columns: of the data set; None: not known, any name may be one. Raises
    UserError, with the accepted names, for a function that cannot be called by names."""
    if inspect.isclass(function):
        raise UserError(f"it is a class: name an object of it whose __call__ gets the response {ACCEPTED}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UserError(
            "it is a generator (it has a yield), and a list is needed: collect the numbers, and return them"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        fix = f"write a function around it that names the response {ACCEPTED}"
        raise UserError(f"the names of its parameters cannot be read, and they are bound by names: {fix}") from None
    kept = function.keywords if isinstance(function, functools.partial) else {}
    parameters = signature.parameters.values()
    named = [one for one in parameters if one.kind in BY_NAME and one.name not in kept]
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    receiver = _receiver(named, takes_all=takes_all)
    taken = [one.name for one in named]
    words = [name for name in WORDS[receiver] if name in taken or (takes_all and name not in kept)]
    required = [one.name for one in named if one.default is one.empty]
    if columns is None:
        others = [name for name in required if name not in words]
    else:
        _check_columns(receiver, required, columns)
        others = [name for name in columns if name in taken or (takes_all and name not in kept)]
        others = [name for name in others if name not in WORDS[receiver]]
    try:
        signature.bind(**dict.fromkeys([*words, *others, *kept]))
    except TypeError as error:
        given = ", ".join([*words, *others])
        raise UserError(f"it can't be called with {given} by name ({error}): remove a / from its parameters") from None
    hidden = [name for name in words if name in (columns or ()) and name not in COLUMNS_TOO]
    return Bound(function, receiver, tuple(words), tuple(others), tuple(hidden))


def _receiver(named: Sequence[inspect.Parameter], *, takes_all: bool) -> str:
    """Returns the word by which a function gets the response. named: parameters that can be given. takes_all: any word
    can be given. Raises UserError unless there is one."""
    names = [one.name for one in named]
    found = [one for one in named if one.name in WORDS]
    if len(found) > 1:  # where one is required, the others may be columns
        found = [one for one in found if one.default is one.empty] or found
    if len(found) > 1:
        several = ", ".join(one.name for one in found)
        raise UserError(f"several of its parameters receive the response ({several}): keep one of {ACCEPTED}")
    if found or takes_all:
        return found[0].name if found else "responses"
    hint = next(filter(None, (did_you_mean(ELSEWHERE.get(name, name), WORDS) for name in names)), "")
    raise UserError(
        f"no parameter of it receives the response ({', '.join(names) or 'it has none with a name'}), because they are "
        f"bound by their names: call one {ACCEPTED}{hint}"
    )


def _check_columns(receiver: str, required: Sequence[str], columns: Sequence[str]) -> None:
    """Raises UserError if a function asks for a name that is neither a word nor a column of the data set."""
    known = [*WORDS[receiver], *columns]
    if not {"ground_truth", "reward_model"} & {*columns}:
        known = [name for name in known if name != "ground_truth"]
    for name in required:
        if name not in known:
            there = ", ".join(columns) or "there is none besides the prompts"
            fix = "add the column, or rename the parameter"
            if name == "environments":  # as TRL gives them
                fix = "they are in other processes; give their class get_reward(), which is added to the score"
            raise UserError(
                f"it asks for {name}, which is not a column of the data set ({there}), nor one of "
                f"{', '.join(WORDS[receiver])}{did_you_mean(ELSEWHERE.get(name, name), known)}: {fix}"
            )


# ---- results --------------------------------------------------------------------------------------------------------


def _awaited(results: list[Any]) -> list[Any]:
    """Awaits what calls returned if they are async, all of them at once."""

    async def awaited(result: Any) -> Any:
        return await result if inspect.isawaitable(result) else result

    async def together() -> list[Any]:
        return await asyncio.gather(*map(awaited, results))

    return _loop().run(together()) if any(map(inspect.isawaitable, results)) else results


@functools.cache
def _loop() -> asyncio.Runner:
    """Returns the event loop of all calls in this process: what a function makes once (a semaphore, a session) stays
    bound to the loop of its first call."""
    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner


def _of_all(result: Any, num: int) -> Result:
    """Checks what a function returned for so many rows."""
    if not isinstance(result, Mapping):
        return Result(result)
    key = _score_key(result, SCORE_KEYS)
    logs = {name: value for name, value in result.items() if name not in (*SCORE_KEYS, EXTRA)}
    logs |= result.get(EXTRA, {})
    return Result(result[key], {name: _listed(value, num) for name, value in logs.items()})


def _of_each(results: Sequence[Any]) -> Result:
    """Checks what a function returned for each row: a number, or a dict with `score` and more numbers."""
    scores: list[Any] = []
    logs: dict[str, list[Any]] = {}
    for row, result in enumerate(results):
        numbers = result if isinstance(result, Mapping) else {"score": result}
        scores.append(numbers[_score_key(numbers, SCORE_KEYS[:1])])
        for name, value in numbers.items():
            if name != "score":
                logs.setdefault(name, [None] * len(results))[row] = value
    return Result(scores, logs)


def _score_key(result: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Returns the first of some keys that a result has. Raises UserError."""
    for key in keys:
        if key in result:
            return key
    raise UserError(f"it returned a dict with {', '.join(map(repr, result))}, and none of {', '.join(keys)}")


def _listed(value: Any, num: int) -> list[Any]:
    """Returns numbers for the log as a list: a tensor, a list, or one number for all rows."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, list | tuple) else [value] * num
