"""What the functions that an algorithm's calls name ask for, and how their arguments are bound by name. No torch."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.calls import Compute, LossCall, Train, Workflow
from rlhf_spmd.plan.runtime_words import ENDED, ENTROPY, LAG_SHARE, LOGPROBS, MASK, MOST_LIKELY, READOUTS, SUMS

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


def parameters_of(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """Returns the parameters of a function. Raises UserError if they cannot be read."""
    try:
        return tuple(inspect.signature(function).parameters.values())
    except ValueError as error:  # of many functions that are written in C
        raise UserError(f"arguments are bound by name, and {error}; write a function around it") from None


def words_of(function: Callable[..., Any]) -> frozenset[str]:
    """Returns what the parameters of a function ask for."""
    return frozenset(word_of(parameter.name) for parameter in parameters_of(function))


def bound(function: Callable[..., Any], available: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keyword arguments for a function, from the available values. Raises UserError if one is missing."""
    arguments = {}
    for parameter in parameters_of(function):
        name, word = parameter.name, word_of(parameter.name)
        if word in available:
            arguments[name] = available[word]
        elif parameter.default is parameter.empty:
            known = ", ".join(sorted(available))
            raise UserError(
                f"{function.__name__}(): no value for parameter {name!r} (available: {known}); pass {word}=... where "
                f"the workflow names the function, or add {word} to Options"
            )
    return arguments


def readout_words(workflow: Workflow, call: LossCall) -> dict[str, tuple[str, str]]:
    """Returns the words by which a loss may ask for outputs of the model that it trains: word -> key of the responses,
    output."""
    words = [name for name, (head, _) in READOUTS.items() if head == workflow.heads[call.model]]
    words += [MOST_LIKELY] if LOGPROBS in words else []
    words += [ENTROPY] if call.entropy else []
    return _qualified(call.responses, words)


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
    readouts: dict[str, Any] = dict(readout_words(workflow, call)) if isinstance(call, Train) else {}
    made_here = {*readouts, *mask_words(workflow, call)}
    for name, _ in call.arguments:
        if name in made_here:
            raise UserError(
                f"{call.function}({name}=...): a parameter {name} gets what this call's model or responses have; give "
                "the argument another name"
            )
    unused = [name for name, key in call.arguments if workflow.shapes[key] != "response"]
    if isinstance(call, Train) and call.loglinear:
        readouts[LAG_SHARE] = None
        unused.append(LAG_SHARE)
    bound(page_function.function, numbers | given | readouts)
    prepare = page_function.prepare
    taken = page_function.words | (words_of(prepare) if prepare else set())
    if unused := [name for name in unused if name not in taken]:
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
