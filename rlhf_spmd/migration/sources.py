"""Reads configurations of other programs: YAML and JSON files, and the words of their command lines."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rlhf_spmd.config.file import yaml_texts
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import read_bytes
from rlhf_spmd.pages.other_names import PROGRAMS, find, table

SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
WHOLE = ("chat_template_kwargs", "apply_chat_template_kwargs", "dataset_mixture")  # mappings that are one value
REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
LONGEST, DEEPEST = 10_000, 20  # characters of a value; references to references
STARTS = ("-m", "--module", "trl")  # words before the name of what a command starts
LAUNCHERS = ("torch.", "accelerate", "deepspeed")  # modules
Value = Any  # a text, a list or a mapping, whose values are texts


@dataclass(frozen=True, slots=True)
class Source:
    """A configuration of another program.

    values: by dotted name.
    left: what is not read, with the reason.
    module: the module or script that the command line starts.
    """

    program: str
    values: Mapping[str, Value]
    left: Mapping[str, str] = field(default_factory=dict)
    module: str = ""


def text_of(value: Value) -> str:
    """Returns a value as text: lists with commas; truth values as `true` and `false`; null is empty."""
    text = ",".join(map(text_of, value)) if isinstance(value, list) else str(value)
    if text in ("True", "False"):
        return text.lower()
    return "" if text in ("None", "null", "~", "{}") else text


# ---- files -----------------------------------------------------------------------------------------------------------


def read_file(path: str, words: Sequence[str] = (), program: str | None = None) -> Source:
    """Reads a file. Raises UserError, also for scripts.

    words: KEY=VALUE, which replace its values.
    program: whose it is; None: the one that has most of its names.
    """
    text = read_bytes(path).decode("utf-8", "replace")
    if path.endswith(".py"):
        raise UserError(
            f"{path} is a Python script, which is not read: write the arguments of its Config(...) into a YAML file, "
            "or as words: `coming-from trl --NAME VALUE`"
        )
    if path.endswith(SCRIPTS) or text.startswith("#!"):
        raise UserError(
            f"{path} is a shell script, which only a shell can expand: in a copy of it, write `python -m rlhf_spmd "
            "coming-from PROGRAM` before the command that trains, comment out its other commands, look at it with "
            "`bash -n`, and run it: `bash COPY > options.yaml`"
        )
    root = yaml_texts(text, path)
    if not isinstance(root, dict):
        raise UserError(f"{path} holds no options: it is not a mapping of names to values")
    replaced, others = _options(words, has_dashes=False)
    if others:
        raise UserError(f"{others[0]!r} is not KEY=VALUE: only values of {path} can be replaced")
    values = dict(_flat(root, "")) | replaced
    left = _without_references(path, values)
    return Source(program or max(PROGRAMS, key=lambda name: sum(bool(find(name, key)) for key in values)), values, left)


def _flat(values: Mapping[str, Value], prefix: str) -> Iterator[tuple[str, Value]]:
    """Yields dotted names and values."""
    for name, value in values.items():
        if isinstance(value, dict) and value and name not in WHOLE:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _without_references(path: str, values: dict[str, Value]) -> dict[str, str]:
    """Replaces ${NAME} by the value of that name, and takes out what refers to none -> those, with the reason."""
    for _ in range(DEEPEST):
        for key, value in values.items():
            if isinstance(value, str):
                values[key] = REFERENCE.sub(lambda match: text_of(values.get(match[1], match[0])), value)
                if len(values[key]) > max(LONGEST, len(value)):
                    raise UserError(f"{path}: {key} refers to values that grow without end")
    unknown = [key for key, value in values.items() if isinstance(value, str) and "${" in value]
    return {key: f"{values.pop(key)} is not a value of this file" for key in unknown}


# ---- command lines ---------------------------------------------------------------------------------------------------


def read_words(program: str, words: Sequence[str]) -> Source:
    """Reads the words of a command that starts a program, after those of its launcher; or its options alone. Raises
    UserError."""
    place = _after_program(words)
    launcher, _ = _options([word for word in words[: max(0, place - 1)] if word not in STARTS], has_dashes=True)
    options, others = _options(words[place:], has_dashes=program != "verl")
    values = launcher | options
    if program == "trl" and "config" in values:
        values = {**read_file(text_of(values.pop("config"))).values, **values}
    for key in [*values]:
        name = key.removeprefix("no_")
        if not find(program, key) and find(program, name):  # as transformers reads truth values
            values = {**values, name: "false"}
            del values[key]
    return Source(program, values, dict.fromkeys(others, "no option"), words[place - 1] if place else "")


def _after_program(words: Sequence[str]) -> int:
    """Returns the place after the word that names the module or the script; 0 if there are options alone."""
    for place, word in enumerate(words):
        if word in STARTS and not "".join(words[place + 1 : place + 2]).startswith(LAUNCHERS):
            return min(place + 2, len(words))
        if word.startswith("-") and place == 0 or re.match(r"[+\w]+\.[\w.]+=", word):
            return 0
        if word.endswith(".py") or place == 0 and words_of(word) & table()["modules"].keys():
            return place + 1
    return 0


def words_of(module: str) -> set[str]:
    """Returns the parts of the name of a module."""
    return {*re.findall("[a-z]+", module.lower())}


def _options(words: Sequence[str], *, has_dashes: bool) -> tuple[dict[str, Value], list[str]]:
    """Returns the options among words, and the other words. has_dashes: --NAME VALUE..., else KEY=VALUE, too."""
    texts: dict[str, list[str]] = {}
    others: list[str] = []
    name = ""
    for word in words:
        key, equals, value = word.partition("=")
        if re.match("--?[A-Za-z]", word):
            name = key.lstrip("-").replace("-", "_")
            texts[name] = [value] if equals else []
        elif equals and not (has_dashes and name):
            texts[key.lstrip("+")] = [value]
        elif name and word != "--":
            texts[name].append(word)
        else:
            others.append(word)
    values: dict[str, Value] = {key: given or "true" for key, given in texts.items()}
    for key, given in texts.items():
        if "".join(given)[:1] in ("[", "{", "'", '"') and len(given) == 1:  # a list or a mapping in YAML
            with suppress(UserError):
                values[key] = yaml_texts(given[0], "")
    return dict(_flat(values, "")), others
