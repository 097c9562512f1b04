"""Binds a reward function by the names of its parameters: those of this program, TRL, verl or OpenRLHF.

The name of the response parameter identifies the program; its other parameters are bound by that program's names:

    responses       this program: prompts, responses
    completions     TRL: prompts, completions; as conversations where the prompt of the data set is one
    solution_str    verl: data_source, solution_str, ground_truth, extra_info; called once for each response
    queries         OpenRLHF: queries, prompts, labels; a query is a prompt with its response

and in all of them completion_ids, the tokens of each response. Any further parameter is a column of the data set, as a
list with one value for each response. All arguments are keywords. The result is one number for each response, or None
where the function does not apply; or a dict with numbers of that kind, for the log.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.data.messages import conversation_of
from rlhf_spmd.runtime.data.readers import no_column

EXTRA = "extra_logs"  # of dicts that functions return: more numbers for the log
WORDS = {  # by the word that is the response
    "responses": ("prompts", "responses", "completion_ids"),
    "completions": ("prompts", "completions", "completion_ids"),
    "solution_str": ("data_source", "solution_str", "ground_truth", "extra_info", "completion_ids"),
    "queries": ("queries", "prompts", "labels", "completion_ids"),
}
OF_EACH = "solution_str"  # such a function is called once for each response
READ_BY_WORDS = ("reward_model", "label")  # columns that words of other names may be
ACCEPTED = "responses, completions (as in TRL), solution_str (verl) or queries (OpenRLHF: prompt with response)"
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

Logs = dict[str, list[Any]]  # further numbers of each response


@dataclass(frozen=True, slots=True)
class Scored:
    """Rows to score.

    columns: of the data set, without those that hold prompts as text or responses.
    key: the column of prompts.
    """

    prompts: Sequence[str]
    responses: Sequence[str]
    tokens: Sequence[Sequence[int]] = ()  # of each response
    columns: Sequence[Mapping[str, Any]] = ()  # of each row
    key: str = "prompt"

    def __len__(self) -> int:
        return len(self.prompts)

    def row(self, row: int) -> Scored:
        """Returns one of the rows."""
        part = slice(row, row + 1)
        return Scored(self.prompts[part], self.responses[part], self.tokens[part], self.columns[part], self.key)

    def column(self, name: str) -> list[Any]:
        return [row.get(name) for row in self.columns] or [None] * len(self)

    def values(self, receiver: str, name: str) -> list[Any]:
        """Returns a word of each row, or a column. receiver: the word that is the response."""
        if name not in WORDS[receiver]:
            return self.column(name)
        if name in ("responses", "solution_str"):
            return [*self.responses]
        if name == "completion_ids":
            return [[*tokens] for tokens in self.tokens or [()] * len(self)]
        if name == "queries":
            return [prompt + response for prompt, response in zip(self.prompts, self.responses, strict=True)]
        if name == "labels":
            return _first(self.column("labels"), self.column("label"))
        if name == "ground_truth":
            models = self.column("reward_model")
            truths = [model.get(name) if isinstance(model, Mapping) else None for model in models]
            return _first(truths, self.column(name))
        if receiver != "completions":
            return [*self.prompts] if name == "prompts" else self.column(name)
        chats = [conversation_of(row, self.key) for row in self.columns] or [None] * len(self)
        if name == "prompts":
            return _first(chats, self.prompts)
        answers = [[{"role": "assistant", "content": text}] for text in self.responses]
        return [answer if chat else text for chat, answer, text in zip(chats, answers, self.responses, strict=True)]


def _first(values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    return [other if value is None else value for value, other in zip(values, others, strict=True)]


@dataclass(frozen=True, slots=True)
class Bound:
    """A reward function, and the names by which it is called.

    receiver: the word that is the response.
    """

    function: Callable
    receiver: str
    words: tuple[str, ...]
    columns: tuple[str, ...]

    def call(self, rows: Scored) -> tuple[Any, Logs]:
        """Returns the scores that the function gives these rows, and further numbers. Raises what it raises, and
        UserError for a dict without scores."""
        values = {name: rows.values(self.receiver, name) for name in (*self.columns, *self.words)}
        if self.receiver != OF_EACH:
            (result,) = _awaited([self.function(**values)])
            return _of_all(result, len(rows))
        calls = [{name: values[name][row] for name in values} for row in range(len(rows))]
        return _of_each(_awaited([self.function(**arguments) for arguments in calls]))


def bind(function: Callable, columns: Sequence[str] | None = ()) -> Bound:
    """Reads the parameters of a function, once. columns: of the data set; None: not known, any name may be one. Raises
    UserError, with the accepted names, for a function that cannot be called by names."""
    if inspect.isclass(function):
        raise UserError(f"it is a class: name an object of it whose __call__ gets the response {ACCEPTED}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        fix = f"write a function around it that names the response {ACCEPTED}"
        raise UserError(f"the names of its parameters cannot be read, and they are bound by names: {fix}") from None
    kept = function.keywords if isinstance(function, functools.partial) else {}
    parameters = signature.parameters.values()
    named = {each.name: each for each in parameters if each.kind in BY_NAME and each.name not in kept}
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    required = [name for name, each in named.items() if each.default is each.empty]
    receiver = _receiver(named, required, takes_all=takes_all)
    words = WORDS[receiver]
    known = (*words, *(required if columns is None else columns))
    lacks_truth = columns is not None and "ground_truth" not in columns and "reward_model" not in columns
    for name in required:
        if name not in known or (name == "ground_truth" and lacks_truth):
            raise no_column(f"it asks for {name}", name, columns or (), words)
    given = [name for name in dict.fromkeys(known) if name in named or (takes_all and name not in kept)]
    try:
        signature.bind(**dict.fromkeys([*given, *kept]))
    except TypeError as error:
        raise UserError(
            f"it can't be called with {', '.join(given)} by name ({error}): remove a / from its parameters"
        ) from None
    return Bound(
        function,
        receiver,
        tuple(name for name in given if name in words),
        tuple(name for name in given if name not in words),
    )


def _receiver(named: Iterable[str], required: Sequence[str], *, takes_all: bool) -> str:
    """Returns the word by which a function gets the response. named: parameters that can be given. takes_all: any word
    can be given. Raises UserError unless there is one."""
    words = [name for name in named if name in WORDS]
    if len(words) > 1:  # where one is required, the others may be columns
        words = [name for name in words if name in required] or words
    if len(words) > 1:
        raise UserError(f"several of its parameters receive the response ({', '.join(words)}): keep one of {ACCEPTED}")
    if words or takes_all:
        return words[0] if words else "responses"
    raise UserError(
        f"no parameter of it receives the response ({', '.join(named) or 'it has none with a name'}), because they are "
        f"bound by their names: call one {ACCEPTED}"
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


def _of_all(result: Any, num: int) -> tuple[Any, Logs]:
    """Returns scores and further numbers from what a function returned for so many rows: a tensor, a list, or one
    number for all of them."""
    if not isinstance(result, Mapping):
        return result, {}
    key = _score_key(result, "score", "rewards", "scores")
    logs = {name: value for name, value in result.items() if name not in ("score", "rewards", "scores", EXTRA)}
    listed = {}
    for name, value in (logs | result.get(EXTRA, {})).items():
        values = value.tolist() if hasattr(value, "tolist") else value
        listed[name] = list(values) if isinstance(values, list | tuple) else [values] * num
    return result[key], listed


def _of_each(results: Sequence[Any]) -> tuple[list[Any], Logs]:
    """Returns scores and further numbers from what a function returned for each row: a number, or a dict with `score`
    and more numbers."""
    scores: list[Any] = []
    logs: Logs = {}
    for row, result in enumerate(results):
        numbers = dict(result) if isinstance(result, Mapping) else {"score": result}
        scores.append(numbers.pop(_score_key(numbers, "score")))
        for name, value in numbers.items():
            logs.setdefault(name, [None] * len(results))[row] = value
    return scores, logs


def _score_key(result: Mapping[str, Any], *keys: str) -> str:
    """Returns the first of some keys that a result has. Raises UserError."""
    for key in keys:
        if key in result:
            return key
    raise UserError(f"it returned a dict with {', '.join(map(repr, result))}, and none of {', '.join(keys)}")
