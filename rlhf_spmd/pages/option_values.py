"""The value of an option from text, or from a value of a file, as the type that the option has."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from rlhf_spmd.errors import UserError

Given = str | Sequence[str] | None  # text; of a file also a list, or null
ITERATIONS, EPOCHS = "iterations", "data.epochs"  # the two ways to say how long a run is
LONGEST = 300  # characters of a value that a message shows
TEMPLATE_KWARGS = "data.chat_template_kwargs"  # the option that is an object of JSON
# what transformers' apply_chat_template takes for itself, or defines for templates
RESERVED = (
    *("conversation", "conversations", "messages", "self", "tools", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "compiled_template"),
    *("strftime_now", "raise_exception", "namespace", "dict"),
)


def check_length(given: Mapping[str, Given]) -> None:
    """Raises UserError if the options that are given say twice how long a run is."""
    if ITERATIONS in given and is_given(given.get(EPOCHS)):
        raise UserError(
            f"{ITERATIONS}={given[ITERATIONS]} and {EPOCHS}={given[EPOCHS]} both say how long the run is: give one of "
            "them"
        )


def is_given(epochs: Given) -> bool:
    """Returns whether the value of data.epochs is one that counts: 0 does not."""
    return isinstance(epochs, str) and bool(epochs.strip("0."))


def check_template_kwargs(where: str, kwargs: Mapping[str, Any]) -> None:
    """Raises UserError for variables that no chat template can be given. where: an option, or a place in a file."""
    taken = next((name for name in kwargs if name in RESERVED), None)
    if taken is not None:
        fix = "give it as the column 'tools' of a row" if taken == "tools" else "rename it, in the template too"
        raise UserError(f"{where} has {taken!r}, which every chat template is given by the program: {fix}")
    try:
        json.dumps(kwargs, allow_nan=False)
    except ValueError:
        raise UserError(f"{where} has a number that is not finite") from None


def parse_value(annotation: Any, text: Any, key: str) -> Any:
    """Converts text to the annotated type: as text, else as JSON ("none" is null), else as a list with commas. None is
    null, else empty; a list is one of texts, or a text with commas. Raises UserError naming key and value, also for
    infinity and NaN."""
    try:
        adapter = TypeAdapter(annotation)
    except PydanticUserError as error:
        raise UserError(f"{key} cannot be set from text, because its type is {annotation}") from error
    if isinstance(text, list) and annotation is str:
        if odd := next((item for item in text if "," in item), None):
            raise UserError(f"{key}: the list has {odd!r}, and a comma would divide it in two; rename it")
        text = ",".join(text)
    candidates: list[Any] = [None, "", [], {}] if text is None else [text]
    text = "null" if text is None else text
    if isinstance(text, str) and candidates == [text]:
        with suppress(ValueError, RecursionError):
            candidates.append(json.loads("null" if text.lower() == "none" else text))
            if isinstance(candidates[-1], bool):  # as text it is a truth value; JSON's would be a number, too
                candidates.pop()
        candidates.append([part.strip() for part in text.split(",")] if text else [])
        candidates += [{}] if text.lower() in ("", "none") else []
    problem, shown = None, f"{key}={text}"
    if len(shown) > LONGEST:
        shown = f"{shown[:LONGEST]}... ({len(shown):,} characters)"
    for candidate in candidates:
        try:
            value = adapter.validate_python(candidate)
        except ValidationError as error:
            if problem is None or all(item["type"] == "tuple_type" for item in problem.errors()):
                problem = error  # what is wrong with a list says more than that a text is none
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{shown}: give a finite number")
        return value
    errors = problem.errors() if problem else []
    if all(item["type"] in ("dict_type", "mapping_type") for item in errors):
        raise UserError(f'{shown}: write an object of JSON, such as {{"enable_thinking": false}}')
    raise UserError(f"{shown}: {'; '.join(dict.fromkeys(map(_wanted, errors)))}")


def _wanted(error: Mapping[str, Any]) -> str:
    """Returns what to give instead of a value with this error of pydantic."""
    kinds = {"int": "give a whole number", "float": "give a number", "bool": "give true or false"}
    if (kind := error["type"].partition("_")[0]) in kinds:
        return kinds[kind]
    if error["type"] == "missing":  # of a tuple
        return "give more values"
    text: str = error["msg"]
    is_compared = error["type"].startswith(("greater_", "less_"))
    return text.replace("Input should be", "give a value" if is_compared else "give")


def text_of(value: Any) -> str:
    """Returns a value as the text that stands for it on the command line."""
    if isinstance(value, Mapping):
        return json.dumps(value) if value else ""
    if isinstance(value, tuple):
        return ",".join(map(text_of, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
