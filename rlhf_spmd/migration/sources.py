"""Reads configurations of other programs: YAML files of TRL and verl, and shell scripts that start one of the three."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_spmd.config.file import yaml_value
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import read_bytes

SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
GROUPS_OF_VERL = (
    *("data", "actor_rollout_ref", "critic", "reward_model", "reward", "custom_reward_function", "algorithm"),
    *("trainer", "async_training"),
)
MAPPINGS = ("chat_template_kwargs", "apply_chat_template_kwargs")  # values of one option
NESTED = ("dataset_mixture", "gradient_checkpointing_kwargs", "lr_scheduler_kwargs", "fsdp_config", "model_init_kwargs")
LEFT_OVER = ("defaults", "hydra")  # of Hydra
SUBSTITUTION = re.compile(r"\$\{([A-Za-z_][\w.]*)(?::?[-=]([^{}]*))?\}|\$([A-Za-z_]\w*)")
ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
PRODUCT = re.compile(r"\$\(\(([\w\s+*/()$-]+)\)\)")
ARRAY = re.compile(r"^\s*([A-Za-z_]\w*)=\((.*?)^\s*\)", re.DOTALL | re.MULTILINE)
MODULE = re.compile(r"(?:openrlhf\.cli\.|openrlhf/cli/)(\w+)")
PROGRAM = re.compile(r"(openrlhf|verl|recipe|trl)(\.[\w.]+)?|.*\.py")  # of a command line
Value = Any  # a text, number, truth value, None, list or mapping, as in YAML


@dataclass(frozen=True, slots=True)
class Source:
    """A configuration of another program.

    values: by dotted name.
    left: what is not read, with the reason.
    module: of a command line of OpenRLHF, e.g. train_dpo.
    """

    program: str
    values: Mapping[str, Value]
    left: Mapping[str, str] = field(default_factory=dict)
    module: str = ""

    def text(self, name: str, default: str = "") -> str:
        """Returns a value as text; truth values are `true` and `false`, and null is empty."""
        return text_of(self.values.get(name, default))

    def number(self, name: str, default: float = 0.0) -> float:
        """Returns a value as a number; default: if it is not one."""
        return number_of(self.values.get(name), default)


def text_of(value: Value) -> str:
    """Returns a value as text."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(text_of, value))
    text = str(value)
    return text.lower() if text.lower() in ("true", "false") else {"None": "", "null": "", "~": ""}.get(text, text)


def number_of(value: Value, default: float = 0.0) -> float:
    """Returns a value as a number; default: if it is not one."""
    try:
        return float(text_of(value))
    except ValueError:
        return default


def read_source(path: str, words: Sequence[str] = (), program: str | None = None) -> Source:
    """Reads a file. words: KEY=VALUE of its command line, which replace its values. program: whose it is; None: told
    from its names. Raises UserError."""
    text = read_bytes(path).decode("utf-8", "replace")
    module = next(iter(MODULE.findall(text)), "")
    left: dict[str, str] = {}
    is_script = Path(path).suffix in SCRIPTS
    values = _of_command(path, text) if is_script else dict(_flat(_yaml(path, text), "", left))
    for word in words:
        key, equals, value = word.lstrip("+~").partition("=")
        if not equals:
            raise UserError(f"{word!r} is not KEY=VALUE: only values of {path} can be replaced")
        values[key] = _scalar(value)
    if not values:
        raise UserError(
            f"{path} has no options of TRL, verl or OpenRLHF: give its YAML file, or the script that starts it"
        )
    return Source(program or _program(values, text), _filled(path, values, left), left, module)


def _program(values: Mapping[str, Value], text: str) -> str:
    """Returns the name of the program whose options these are."""
    if any(key.partition(".")[0] in GROUPS_OF_VERL and "." in key for key in values):
        return "verl"
    return "openrlhf" if "openrlhf" in text or "pretrain" in values else "trl"


def _yaml(path: str, text: str) -> Mapping[str, Value]:
    try:
        root = yaml_value(text)
    except UserError as error:
        raise UserError(f"{path} is not YAML: {error}") from None
    if not isinstance(root, dict):
        raise UserError(f"{path} holds no options: it is not a mapping of names to values")
    return root


def _flat(values: Mapping[str, Value], prefix: str, left: dict[str, str]) -> Iterator[tuple[str, Value]]:
    """Yields dotted names and values."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key in LEFT_OVER:
            texts = [text_of(one) for one in value] if isinstance(value, list) else [key]
            left[key] = f"{', '.join(texts)}: other files of Hydra are not read"
        elif isinstance(value, dict) and (prefix or name not in NESTED) and name not in MAPPINGS:
            yield from _flat(value, f"{key}.", left)
        else:
            yield key, value


def _filled(path: str, values: Mapping[str, Value], left: dict[str, str]) -> dict[str, Value]:
    """Replaces ${NAME} by the value of that name in the same file."""

    def value_of(value: Value, depth: int = 0) -> Value:
        if not isinstance(value, str) or "${" not in value:
            return value
        if depth > len(values):
            raise UserError(f"{path}: {value} refers to itself")
        whole = SUBSTITUTION.fullmatch(value)
        if whole and whole[1] in values:
            return value_of(values[whole[1]], depth + 1)

        def inner(match: re.Match[str]) -> str:
            known = values.get(match[1] or "", match[0])
            return text_of(value_of(known, depth + 1)) if known != match[0] else match[0]

        return SUBSTITUTION.sub(inner, value)

    found = {key: value_of(value) for key, value in values.items()}
    for key, value in [*found.items()]:
        if isinstance(value, str) and "${" in value:
            left[key] = f"{value} is not a value of this file"
            del found[key]
    return found


# ---- scripts ---------------------------------------------------------------------------------------------------------


def _of_command(path: str, text: str) -> dict[str, Value]:
    """Returns the options of the commands of a script: KEY=VALUE with dots (Hydra), --NAME VALUE and --NAME=VALUE."""
    text = re.sub(r"(?m)(^|\s)#(?!!).*$", r"\1", text).replace("\\\n", " ")
    variables: dict[str, str] = {}
    for name, inside in ARRAY.findall(text):
        variables[name] = " ".join(inside.split())
    text = ARRAY.sub("", text)
    text = re.sub(r"\$\{(\w+)\[[@*]\]\}", r"${\1}", text)
    text = re.sub(r"(?s)<<-?\s*['\"]?(\w+)['\"]?\n(.*?)\n\1\b", r"\n\2\n", text)  # here documents: commands, too
    values: dict[str, Value] = {}
    for line in text.split("\n"):
        try:
            words = shlex.split(_expanded(line, variables))
        except ValueError as error:
            raise UserError(f"{path}: {error} in {' '.join(line.split())[:60]!r}") from None
        match = ASSIGNMENT.fullmatch(words[0]) if len(words) == 1 else None
        if words and words[0] == "export":
            match = ASSIGNMENT.fullmatch(words[-1])
        if match and "." not in match[1]:
            variables[match[1]] = match[2]
        else:
            values |= dict(_options_of(words))
    return values


def _expanded(line: str, variables: Mapping[str, str]) -> str:
    """Expands a line with the variables that the script sets, their defaults, and products of numbers."""

    def inner(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return variables.get(name, match[2] if match[2] is not None else match[0]).strip("\"'" if match[2] else "")

    for _ in range(len(variables) + 1):
        before, line = line, SUBSTITUTION.sub(inner, line)
        if line == before:
            break
    return PRODUCT.sub(lambda match: _product(match, variables), line)


def _product(match: re.Match[str], variables: Mapping[str, str]) -> str:
    """Computes $((...)): sums and products of whole numbers and variables."""
    text = re.sub(r"\$?([A-Za-z_]\w*)", lambda name: variables.get(name[1], name[0]), match[1])
    if not re.fullmatch(r"[\d\s+*/()-]+", text):
        return match[0]
    total = 0
    for term in text.replace("-", "+-").split("+"):
        product = 1
        for factor in term.strip("() ").split("*"):
            product *= int(factor.strip("() ") or 1)
        total += product if term.strip() else 0
    return str(total)


def _options_of(words: Sequence[str]) -> Iterator[tuple[str, Value]]:
    """Yields the options among the arguments of a command, after the program that they are for."""
    places = [place for place, word in enumerate(words) if PROGRAM.fullmatch(word)]
    number = places[0] + 1 if places else len(words)
    while number < len(words):
        word, number = words[number], number + 1
        key, equals, value = word.lstrip("+~").partition("=")
        if word.startswith("--") and len(word) > 2:
            name = word[2:].partition("=")[0].replace("-", "_")
            given = [value] if equals else []
            while not equals and number < len(words) and not re.match(r"--?[A-Za-z]", words[number]):
                given, number = [*given, words[number]], number + 1
            if name[:1].isalpha():
                yield name, _scalar(given[0]) if len(given) == 1 else given or True
        elif equals and "." in key and re.fullmatch(r"[\w.@/-]+", key) and key.partition(".")[0] in GROUPS_OF_VERL:
            yield key, _scalar(value)


def _scalar(text: str) -> Value:
    """Returns a value of a command line as YAML reads it; what is not YAML is a text."""
    try:
        value = yaml_value(text)
    except UserError:
        return text
    return text if isinstance(value, dict) and not text.startswith("{") else value
