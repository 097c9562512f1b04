"""What the functions that an algorithm's calls name ask for, and how their arguments are bound by name. No torch."""

import inspect
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.runtime_words import ENDED, ENTROPY, LAG_SHARE, LOGPROBS, MASK, MOST_LIKELY, READOUTS, SUMS
from rlhf_spmd.plan.workflow import Compute, LossCall, Train, Workflow

COMPANIONS = ("_sums", "_prepare", "_finish")
SHAPE_LETTERS = re.compile(r"_[A-Z][A-Z0-9]*$")


@dataclass(frozen=True, slots=True)
class PageFunction:
    """A function that a call names, with its companions (page.py).

    words: that its parameters ask for.
    """

    name: str
    function: Callable[..., Any]
    sums: Callable[..., Any] | None
    prepare: Callable[..., Any] | None
    finish: Callable[..., Any] | None
    words: frozenset[str]


def word_of(parameter: str) -> str:
    """Returns the name of a parameter without the letters of its shape: `logprobs` of `logprobs_BG`."""
    return SHAPE_LETTERS.sub("", parameter)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a page's function.

    word: its name without the letters of its shape.
    """

    name: str
    word: str
    is_needed: bool
    by_place: bool


def parameters_of(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    """Returns the parameters of a function, which a user may have written as an object that has no hash. Raises
    UserError if they cannot be read."""
    return _known_parameters(function) if isinstance(function, Hashable) else _parameters(function)


def _parameters(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    try:
        found = inspect.signature(function).parameters.values()
    except ValueError as error:  # of many functions that are written in C
        raise UserError(f"arguments are bound by name, and {error}; write a function around it") from None
    return tuple(
        Parameter(one.name, word_of(one.name), one.default is one.empty, one.kind is one.POSITIONAL_ONLY)
        for one in found
    )


_known_parameters = cache(_parameters)


def words_of(function: Callable[..., Any]) -> frozenset[str]:
    """Returns what the parameters of a function ask for."""
    return frozenset(one.word for one in parameters_of(function))


def bound(function: Callable[..., Any], available: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keyword arguments for a function, from the available values. Raises UserError if one is missing."""
    found = {}
    for one in parameters_of(function):
        if one.by_place:
            raise UserError(f"{function.__name__}() takes {one.name} by position only; remove the / after it")
        if one.word in available:
            found[one.name] = available[one.word]
        elif one.is_needed:
            known = ", ".join(sorted(available))
            raise UserError(
                f"{function.__name__}(): no value for parameter {one.name!r} (available: {known}); pass {one.word}=... "
                f"where the workflow names the function, or add {one.word} to Options"
            )
    return found


def readout_words(workflow: Workflow, call: LossCall) -> dict[str, tuple[str, str]]:
    """Returns the words by which a loss may ask for outputs of the model that it trains: word -> key of the responses,
    output."""
    own = [name for name, (head, _) in READOUTS.items() if head == workflow.heads[call.model]]
    own += [MOST_LIKELY] if LOGPROBS in own else []
    own += [ENTROPY] if call.entropy else []
    return _qualified(call.responses, own)


def mask_words(workflow: Workflow, call: LossCall | Compute) -> dict[str, tuple[str, str]]:
    """Returns the words by which functions may ask about the responses of a call: word -> their key, `mask` or
    `ended`."""
    if isinstance(call, Compute):
        keys = tuple(key for _, key in call.arguments if workflow.shapes[key] == "response")
    else:
        keys = call.responses
    return _qualified(tuple(dict.fromkeys(keys)), [MASK, ENDED])


def _qualified(keys: tuple[str, ...], words: list[str]) -> dict[str, tuple[str, str]]:
    """Puts the key of the responses before each word if there are several: word -> (key, unqualified word)."""
    if len(keys) == 1:
        return {word: (keys[0], word) for word in words}
    return {f"{key}_{word}": (key, word) for key in keys for word in words}


def check_call(
    page_function: PageFunction, workflow: Workflow, call: LossCall | Compute, numbers: dict[str, Any]
) -> None:
    """Raises UserError if a call gives its function an unknown argument, or lacks one that the function needs.

    numbers: options and state of the algorithm.
    """
    given: dict[str, Any] = {name: None for name, _ in call.arguments} | mask_words(workflow, call)
    own: dict[str, Any] = dict(readout_words(workflow, call)) if isinstance(call, Train) else {}
    own |= {LAG_SHARE: None} if isinstance(call, Train) and call.loglinear else {}
    bound(page_function.function, numbers | given | own)
    prepare = page_function.prepare
    taken = page_function.words | (words_of(prepare) if prepare else set())
    unused = [name for name, key in call.arguments if name not in taken and workflow.shapes[key] != "response"]
    if isinstance(call, Train) and call.loglinear and LAG_SHARE not in taken:
        unused.append(LAG_SHARE)
    if unused:
        raise UserError(
            f"{call.function}() does not take {', '.join(unused)}; give it such a parameter, or leave it out of the "
            "workflow"
        )
    made = dict.fromkeys(call.outputs)
    for suffix, companion in zip(COMPANIONS, (page_function.sums, prepare, page_function.finish), strict=True):
        if companion is None and isinstance(call, Compute) and call.sums and suffix != "_prepare":
            raise UserError(
                f"{call.function} has sums=True, but its file has no function {call.function}{suffix}; add it"
            )
        if companion is not None:
            bound(companion, numbers | given | made | {SUMS: None, "divisor": None})
