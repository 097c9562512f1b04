"""Files of `--config`: YAML, in which nested keys are the dotted names of options. Reads them and writes them.

A value is read as the text that stands in the file, so it means what it means on the command line: `1e-3` is a number
where a number is wanted, and `on` or `no` is a text where a text is wanted. The only values of YAML's own are null,
lists, and what the mapping of data.chat_template_kwargs holds.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from rlhf_spmd.config.checks import foreign_functions
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.json_text import json_value
from rlhf_spmd.files.reading import is_file, read_bytes
from rlhf_spmd.pages.option_tree import Setting
from rlhf_spmd.pages.option_values import EPOCHS, ITERATIONS, TEMPLATE_KWARGS, check_length, is_given

# Keys that name what options with dashes name on the command line.
WORDS = ("preset", "algorithm", "model", "strategy", "layout", "cluster", "calibration", "runs", "name")
STRATEGY_NAME = "strategy.name"  # the strategy, where `strategy` is a mapping with its options
FUNCTIONS = ("reward_function", "eval.reward_function", "environment")
CONFIG, PAGE = "config.json", "algorithm.py"  # of a run folder: the first names the second by its title
TAG = "tag:yaml.org,2002:"  # of YAML's own types
DEEPEST_LEVEL = 20  # of values in values, of a file of another program


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What a file sets.

    words: those of WORDS.
    page: the algorithm's file, if the file lies in a run folder that has one.
    of_run: a run wrote it (config.json), so the code that it names is not the user's word.
    """

    path: str
    words: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[Setting, ...] = ()
    page: str | None = None
    of_run: bool = False

    @property
    def code(self) -> dict[str, str]:
        """What a file of a run names that is code and comes with the run: word or option -> its text."""
        algorithm = self.page or self.words.get("algorithm", "")
        found = {"algorithm": algorithm} | {"strategy": self.words.get("strategy", "")}
        found = {word: text for word, text in found.items() if text.endswith(".py")}
        for one in self.settings:
            functions = foreign_functions(one.value or "") if isinstance(one.value, str | None) else one.value
            found |= {one.key: ",".join(functions)} if one.key in FUNCTIONS and functions else {}
        return found if self.of_run else {}

    def without(self, leaves_out: Callable[[str], bool]) -> "ConfigFile":
        """Returns a copy without the options whose keys are left out."""
        return replace(self, settings=tuple(one for one in self.settings if not leaves_out(one.key)))

    @property
    def given(self) -> list[Setting]:
        """Its settings, without those that follow from others. Raises UserError if two say how long a run is."""
        values = {one.key: one.value for one in self.settings}
        try:
            check_length({} if Path(self.path).name == CONFIG else values)  # a run folder's has what follows, too
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None
        follows = is_given(values.get(EPOCHS))
        return [one for one in self.settings if one.key != ITERATIONS or not follows]


def read_config_file(path: str) -> ConfigFile:
    """Reads a file. Raises UserError naming file and line."""
    if not path:
        raise UserError("--config is empty: give a file (a variable that is not set?)")
    is_json = path.endswith(".json")
    settings: dict[str, Setting] = {}
    try:
        text = read_bytes(path).decode("utf-8-sig")
        root = yaml.compose(to_text(json_value(text)) if is_json else text, Loader=yaml.SafeLoader)
        if root is None:
            raise UserError(f"{path} is empty: write options into it, such as `iterations: 3`")
        if not isinstance(root, yaml.MappingNode):
            raise UserError(f"{path} holds a {root.id}, not options: write lines such as `iterations: 3`")
        for one in _settings(path if is_json else f"{path}, line {{}}", root, ""):
            if one.key in settings:
                first = settings[one.key].where.removeprefix(f"{path}, ").removesuffix(": ")
                raise UserError(f"{one.where}{one.key} is already given in {first}; drop one")
            settings[one.key] = one
    except OSError as error:
        where = f" (looked in {Path.cwd()})" if isinstance(error, FileNotFoundError) else ""
        raise UserError(f"--config {path} can't be read: {error.strerror or error}{where}; give a file") from None
    except yaml.YAMLError as error:
        raise UserError(_problem(path, error)) from None
    except RecursionError:
        raise UserError(f"{path} is nested too deep: an option has at most one group around it") from None
    except ValueError as error:  # of UTF-8 or JSON
        raise UserError(f"{path} can't be read as {'JSON' if is_json else 'UTF-8'}: {error}; save it anew") from None
    words = {name: settings.pop(name) for name in WORDS if name in settings}
    for one in words.values():
        if one.value is not None and not (one.value and isinstance(one.value, str)):
            raise UserError(f"{one.where}{one.key} must be one text, e.g. {one.key}: NAME")
    page, of_run = Path(path).with_name(PAGE), Path(path).name == CONFIG
    given = {name: str(one.value) for name, one in words.items() if one.value}
    return ConfigFile(path, given, tuple(settings.values()), str(page) if of_run and is_file(page) else None, of_run)


def yaml_value(text: str) -> Any:
    """Reads YAML into plain values, for files that are not options of this program. Raises UserError."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(" ".join(str(error).split())) from None


def yaml_texts(text: str, path: str) -> Any:
    """Returns the texts, lists and mappings of YAML or JSON. Raises UserError for what is none."""
    depth = 0
    try:
        for event in yaml.parse(text):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST_LEVEL or isinstance(event, yaml.AliasEvent):
                raise UserError(f"{path} is nested too deep, or has an alias (*NAME): write the values out")
        return yaml.load(text, Loader=yaml.BaseLoader)  # makes texts, lists and mappings alone
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None


def _problem(path: str, error: yaml.YAMLError) -> str:
    """Returns a message for a file that is not YAML."""
    mark = getattr(error, "problem_mark", None)
    where = f"{path}, line {mark.line + 1}" if mark else path
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    return f"{where}: not valid YAML ({problem}): write `key: value`, with spaces before it and quotes around odd texts"


def _settings(place: str, node: yaml.MappingNode, prefix: str) -> Iterator[Setting]:
    """Yields the options of a mapping, by dotted keys.

    place: of a key, with {} for its line.
    """
    keys: dict[str, int] = {}
    for key_node, value in node.value:
        line = key_node.start_mark.line + 1
        where = f"{place.format(line)}: "
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == f"{TAG}merge":
            raise UserError(f"{where}a {key_node.tag.removeprefix(TAG)} is not the name of an option: write it out")
        key = prefix + key_node.value
        if key in keys:
            raise UserError(f"{where}{key} is already given in line {keys[key]}; drop one")
        keys[key] = line
        if not isinstance(value, yaml.MappingNode):
            yield Setting("strategy" if key == STRATEGY_NAME else key, _value(f"{where}{key}", value), where, WORDS)
        elif key == TEMPLATE_KWARGS:
            kwargs = _Loader("").construct_document(value)
            yield Setting(key, json.dumps(kwargs, default=str), where, WORDS)
        else:
            yield from _settings(place, value, f"{key}.")


def _value(what: str, node: yaml.Node) -> str | list[str] | None:
    """Returns the text of a scalar, None for null, or the texts of a list.

    what: the option and its place, for messages.
    """
    if not node.tag.startswith(TAG):
        raise UserError(f"{what} has the tag {node.tag}, which is not read: write the value alone")
    if isinstance(node, yaml.ScalarNode):
        return None if node.tag == f"{TAG}null" else str(node.value)
    items = [item.value for item in node.value]
    if not all(isinstance(item, str) for item in items):
        raise UserError(f"{what} has a list of something else than texts and numbers: write [a, b]")
    return items


class _Loader(yaml.SafeLoader):
    """Reads values as YAML means them, but names as texts: `on` names something else than `true`."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        return {str(key.value): self.construct_object(value, deep=True) for key, value in node.value}


class _Dumper(yaml.SafeDumper):
    """Writes lists in one line, and texts with line breaks and the like between double quotes."""

    def represent_list(self, data: list[Any]) -> yaml.Node:
        return self.represent_sequence(f"{TAG}seq", data, flow_style=True)

    def represent_str(self, data: str) -> yaml.Node:
        return self.represent_scalar(f"{TAG}str", data, style=None if data.isprintable() else '"')


_Dumper.add_representer(list, _Dumper.represent_list)
_Dumper.add_representer(str, _Dumper.represent_str)


def to_text(values: Mapping[str, Any]) -> str:
    """Returns plain values, options in their groups (`config.resolved`), as a file that can be given back."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)
    return text.removesuffix("\n")
