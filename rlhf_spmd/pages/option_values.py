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
TEMPLATE_KWARGS = "data.chat_template_kwargs"  # the option that is an object of JSON
# what transformers' apply_chat_template takes for itself, or defines for templates
RESERVED = (
    *("conversation", "conversations", "messages", "self", "tools", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "compiled_template"),
    *("strftime_now", "raise_exception", "namespace", "dict"),
)


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
        if divided := [item for item in text if "," in item]:
            raise UserError(f"{key}: the list has {divided[0]!r}, and a comma would divide it in two; rename it")
        text = ",".join(text)
    candidates: list[Any] = [None, "", [], {}] if text is None else [text]
    if isinstance(text, str):
        with suppress(ValueError, RecursionError):
            value = json.loads("null" if text.lower() == "none" else text)
            candidates += [] if isinstance(value, bool) else [value]  # as text it is a truth value, and no number
        candidates.append([part.strip() for part in text.split(",")] if text else [])
        candidates += [{}] if text.lower() in ("", "none") else []
    problems: list[Any] = []
    for candidate in candidates:
        try:
            value = adapter.validate_python(candidate)
            if not isinstance(value, float) or math.isfinite(value):
                return value
            problems = [{"type": "", "msg": "give a finite number"}]
        except ValidationError as error:
            if all(problem["type"] == "tuple_type" for problem in problems):
                problems = error.errors()  # what is wrong with a list says more than that a text is none
    texts = dict.fromkeys(problem["msg"].partition(", unable to")[0] for problem in problems)
    shown = "null" if text is None else f"{text!s:.300}"
    raise UserError(f"{key}={shown}: {'; '.join(texts).replace('Input', 'it')}")


def text_of(value: Any) -> str:
    """Returns a value as the text that stands for it on the command line."""
    if isinstance(value, Mapping):
        return json.dumps(value) if value else ""
    if isinstance(value, tuple):
        return ",".join(map(text_of, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
