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
from operator import add
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.option_suggestions import did_you_mean
from rlhf_spmd.runtime.data.messages import conversation_of

SCORE_KEYS = ("score", "rewards", "scores")  # of dicts that functions return, the first one counts
EXTRA_KEYS = ("extra_logs",)  # of dicts: more numbers for the log


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


def _prompts(rows: Scored) -> list[str]:
    return list(rows.prompts)


def _responses(rows: Scored) -> list[str]:
    return list(rows.responses)


def _prompts_of_trl(rows: Scored) -> list[str | list]:
    return [conversation_of(row, rows.key) or text for row, text in zip(rows.records, rows.prompts, strict=True)]


def _completions(rows: Scored) -> list[str | list]:
    pairs = zip(rows.records, rows.responses, strict=True)
    return [[{"role": "assistant", "content": text}] if conversation_of(row, rows.key) else text for row, text in pairs]


def _truths(rows: Scored) -> list[Any]:
    models = [row["reward_model"] if isinstance(row.get("reward_model"), Mapping) else {} for row in rows.records]
    return _first([model.get("ground_truth") for model in models], rows.column("ground_truth"))


def _first(values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    return [other if value is None else value for value, other in zip(values, others, strict=True)]


IDS: dict[str, Callable[[Scored], list[Any]]] = {
    "completion_ids": lambda rows: [list(tokens) for tokens in rows.tokens or [()] * len(rows)]
}
WORDS: dict[str, dict[str, Callable[[Scored], list[Any]]]] = {  # by the word that is the response
    "responses": {"prompts": _prompts, "responses": _responses, **IDS},
    "completions": {"prompts": _prompts_of_trl, "completions": _completions, **IDS},
    "solution_str": {
        "data_source": lambda rows: rows.column("data_source"),
        "solution_str": _responses,
        "ground_truth": _truths,
        "extra_info": lambda rows: rows.column("extra_info"),
        **IDS,
    },
    "queries": {
        "queries": lambda rows: list(map(add, rows.prompts, rows.responses)),
        "prompts": _prompts,
        "labels": lambda rows: _first(rows.column("labels"), rows.column("label")),
        **IDS,
    },
}
OF_EACH = "solution_str"  # such a function is called once for each response
COLUMNS_TOO = ("data_source", "extra_info", "ground_truth", "labels")  # words that are the columns of these names
READ_BY_WORDS = ("reward_model", "label")  # columns that words of other names may be
PROGRAMS = {"responses": "this program", "completions": "TRL", "solution_str": "verl", "queries": "OpenRLHF"}
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
        made = {name: rows.column(name) for name in self.columns}
        made |= {name: WORDS[self.receiver][name](rows) for name in self.words}
        if self.receiver == OF_EACH:
            calls = [{name: values[index] for name, values in made.items()} for index in range(len(rows))]
            return _of_each(_awaited([self.function(**arguments) for arguments in calls]))
        (found,) = _awaited([self.function(**made)])
        return _of_all(found, len(rows))


def bind(function: Callable, columns: Sequence[str] | None = ()) -> Bound:
    """Reads the parameters of a function, once. columns: of the data set; None: not known, any name may be one. Raises
    UserError, with the accepted names, for a function that cannot be called by names."""
    if what := _no_function(function):
        raise UserError(f"it is {what}")
    parameters = _parameters(function)
    layers = (function, inspect.unwrap(function))
    fixed = {name for one in layers if isinstance(one, functools.partial) for name in one.keywords}
    named = {name: one for name, one in parameters.items() if one.kind in BY_NAME and name not in fixed}
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    receiver = _receiver(function, named, takes_all=takes_all and "responses" not in fixed)
    words = [name for name in WORDS[receiver] if name in named or (takes_all and name not in fixed)]
    required = [name for name, one in named.items() if one.default is one.empty]
    if columns is None:
        others = [name for name in required if name not in words]
    else:
        _check_columns(receiver, required, columns)
        others = [one for one in columns if one not in WORDS[receiver] and (one in named or takes_all)]
        taken = fixed | {*_filled(function)}
        others = [one for one in others if one not in taken]
    try:
        _own_signature(function).bind(**dict.fromkeys([*words, *others]))
    except TypeError as error:
        given = ", ".join([*words, *others])
        fix = "let its decorator pass on what it gets (**kwargs), or not name the wrapped function (functools.wraps)"
        raise UserError(f"it can't be called with {given} by name ({error}): {fix}") from None
    hidden = [name for name in words if name in (columns or ()) and name not in COLUMNS_TOO]
    return Bound(function, receiver, tuple(words), tuple(others), tuple(hidden))


def _no_function(function: Callable) -> str:
    """Returns why calling this does not make scores, and the fix; empty if it may."""
    if inspect.isclass(function):
        return (
            f"a class, and calling it makes an object: name an object of it whose __call__ gets the response {ACCEPTED}"
        )
    code = [function, inspect.unwrap(function), getattr(function, "func", None), type(function).__call__]
    if any(inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in code):
        return "a generator (it has a yield), and a list is needed: collect the numbers in a list, and return that"
    return ""


def _filled(function: Callable) -> list[str]:
    """Returns the parameters that something else fills by place, so that no column of that name can be given by name:
    `self`, and what a partial has bound so."""
    if isinstance(function, functools.partial):
        names = list(_own_signature(function.func).parameters)[: len(function.args)]
        return [*names, *_filled(function.func)]
    called = function if inspect.isroutine(function) else type(function).__call__
    if inspect.ismethod(called) or not inspect.isroutine(function):
        return list(inspect.signature(getattr(called, "__func__", called)).parameters)[:1]
    return []


def _own_signature(function: Callable) -> inspect.Signature:
    """Returns the signature of a function; of a decorated one that of its decorator."""
    try:
        return inspect.signature(function, follow_wrapped=False)
    except ValueError:  # functools.cache has none
        return inspect.signature(function)


def _parameters(function: Callable) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function; of a decorated one those of its decorator, unless that passes any name on.
    Raises UserError."""
    try:
        found = _own_signature(function).parameters
        if any(one.kind is one.VAR_KEYWORD for one in found.values()):
            found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        fix = f"write a function around it that names the response {ACCEPTED}"
        raise UserError(f"the names of its parameters cannot be read, and they are bound by names: {fix}") from None
    if unnamed := [name for name, one in found.items() if one.kind is one.POSITIONAL_ONLY]:
        raise UserError(
            f"it takes {', '.join(unnamed)} by position only, and parameters are bound by their names: remove the / "
            f"after them, or write a function around it that names the response {ACCEPTED}"
        )
    return found


def _receiver(function: Callable, named: Mapping[str, inspect.Parameter], *, takes_all: bool) -> str:
    """Returns the word by which a function gets the response. named: parameters that can be given. takes_all: any word
    can be given. Raises UserError unless there is one."""
    found = [name for name in WORDS if name in named]
    if len(found) > 1:  # where one is required, the others may be columns
        must = [name for name in found if named[name].default is inspect.Parameter.empty]
        found = must if len(must) == 1 else found
    if len(found) > 1:
        programs = ", ".join(f"{name} ({PROGRAMS[name]})" for name in found)
        raise UserError(f"several of its parameters receive the response: {programs}; keep one of them")
    if found or takes_all:
        return found[0] if found else "responses"
    guesses = [did_you_mean(ELSEWHERE.get(name, name), WORDS) for name in named]
    hint = next(filter(None, guesses), "")
    raise UserError(
        f"no parameter of it receives the response ({', '.join(named) or 'it has none with a name'}), because they are "
        f"bound by their names: call one {ACCEPTED}{hint}"
    )


def _check_columns(receiver: str, required: Sequence[str], columns: Sequence[str]) -> None:
    """Raises UserError if a function asks for a name that is neither a word nor a column of the data set."""
    words, there = WORDS[receiver], ", ".join(columns) or "there is none besides the prompts"
    for name in required:
        if name == "environments" and name not in columns:
            raise UserError(
                "it asks for environments (as TRL gives them), which are in other processes: give their class "
                "get_reward(), which is added to the score"
            )
        if name not in words and name not in columns:
            known = [*words, *columns]
            raise UserError(
                f"it asks for {name}, which is not a column of the data set ({there}), nor one of {', '.join(words)}"
                f"{did_you_mean(ELSEWHERE.get(name, name), known)}: add the column, or rename the parameter"
            )
    if "ground_truth" in required and "ground_truth" in words and not {"ground_truth", "reward_model"} & {*columns}:
        raise UserError(
            f"it asks for ground_truth, and the data set has neither this column nor reward_model ({there}): add one"
        )


# ---- results --------------------------------------------------------------------------------------------------------


def _awaited(found: list[Any]) -> list[Any]:
    """Awaits what calls returned if they are async, all of them at once."""

    async def one_of(value: Any) -> Any:
        return await value if inspect.isawaitable(value) else value

    async def together() -> list[Any]:
        return await asyncio.gather(*map(one_of, found))

    return _loop().run(together()) if any(map(inspect.isawaitable, found)) else found


@functools.cache
def _loop() -> asyncio.Runner:
    """Returns the event loop of all calls in this process: what a function makes once (a semaphore, a session) stays
    bound to the loop of its first call."""
    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner


def _of_all(found: Any, num: int) -> Result:
    """Checks what a function returned for so many rows."""
    if not isinstance(found, Mapping):
        return Result(found)
    key = next((key for key in SCORE_KEYS if key in found), None)
    if key is None:
        raise UserError(f"it returned a dict with {', '.join(map(repr, found))}, and none of {', '.join(SCORE_KEYS)}")
    logs = {name: value for name, value in found.items() if name not in (*SCORE_KEYS, *EXTRA_KEYS)}
    for extra in EXTRA_KEYS:
        logs |= found.get(extra, {})
    return Result(found[key], {name: _listed(value, num) for name, value in logs.items()})


def _of_each(answers: Sequence[Any]) -> Result:
    """Checks what a function returned for each row: a number, or a dict with `score` and more numbers."""
    scores: list[Any] = []
    logs: dict[str, list[Any]] = {}
    for index, found in enumerate(answers):
        if isinstance(found, Mapping):
            if "score" not in found:
                raise UserError(f"it returned a dict with {', '.join(map(repr, found))}, and no 'score'")
            for name, value in found.items():
                if name != "score":
                    logs.setdefault(name, [None] * len(answers))[index] = value
            found = found["score"]
        scores.append(found)
    return Result(scores, logs)


def _listed(value: Any, num: int) -> list[Any]:
    """Returns numbers for the log as a list: a tensor, a list, or one number for all rows."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, list | tuple) else [value] * num
