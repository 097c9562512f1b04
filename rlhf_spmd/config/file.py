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
from rlhf_spmd.pages.option_values import EPOCHS, ITERATIONS, TEMPLATE_KWARGS

# Keys that name what options with dashes name on the command line.
WORDS = ("preset", "algorithm", "model", "strategy", "layout", "cluster", "calibration", "runs", "name")
STRATEGY_NAME = "strategy.name"  # the strategy, where `strategy` is a mapping with its options
FUNCTIONS = ("reward_function", "eval.reward_function", "environment")
CONFIG, PAGE = "config.json", "algorithm.py"  # of a run folder: the first names the second by its title
TAG = "tag:yaml.org,2002:"  # of YAML's own types


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
        if not self.of_run:
            return {}
        named = {"algorithm": self.page or self.words.get("algorithm", ""), "strategy": self.words.get("strategy", "")}
        code = {word: text for word, text in named.items() if text.endswith(".py")}
        for setting in self.settings:
            if setting.key in FUNCTIONS and (functions := foreign_functions(str(setting.value or ""))):
                code[setting.key] = ",".join(functions)
        return code

    def without(self, leaves_out: Callable[[str], bool]) -> "ConfigFile":
        """Returns a copy without the options whose keys are left out."""
        kept = [setting for setting in self.settings if not leaves_out(setting.key)]
        return replace(self, settings=tuple(kept))

    @property
    def given(self) -> list[Setting]:
        """Its settings; of a run's, without the number of iterations where that follows from data.epochs. Raises
        UserError if a user gives both."""
        has_epochs = any(setting.key == EPOCHS and str(setting.value).strip("0.") for setting in self.settings)
        kept = [setting for setting in self.settings if setting.key != ITERATIONS or not has_epochs]
        if len(kept) < len(self.settings) and Path(self.path).name != CONFIG:
            raise UserError(f"{self.path}: {ITERATIONS} and {EPOCHS} both say how long the run is: give one of them")
        return kept


def read_config_file(path: str) -> ConfigFile:
    """Reads a file. Raises UserError naming file and line."""
    if not path:
        raise UserError("--config is empty: give a file (a variable that is not set?)")
    settings: dict[str, Setting] = {}
    try:
        text = read_bytes(path).decode("utf-8-sig")
        root = yaml.compose(to_text(json_value(text)) if path.endswith(".json") else text, Loader=yaml.SafeLoader)
        if not isinstance(root, yaml.MappingNode):
            raise UserError(f"{path} holds no options: write lines such as `iterations: 3`")
        for setting in _settings(path, root, ""):
            if setting.key in settings:
                raise UserError(f"{setting.where}{setting.key} is given twice; drop one")
            settings[setting.key] = setting
    except OSError as error:
        raise UserError(f"--config {path} can't be read: {error.strerror or error}; give a file") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise UserError(f"{path} is not a file of options: {problem}; write `key: value`, in UTF-8") from None
    words = {}
    for name in settings.keys() & {*WORDS}:
        setting = settings.pop(name)
        if isinstance(setting.value, list) or setting.value == "":
            raise UserError(f"{setting.where}{name} must be one text, e.g. {name}: NAME")
        if setting.value:
            words[name] = str(setting.value)
    page, of_run = Path(path).with_name(PAGE), Path(path).name == CONFIG
    return ConfigFile(path, words, tuple(settings.values()), str(page) if of_run and is_file(page) else None, of_run)


def yaml_value(text: str) -> Any:
    """Reads YAML into plain values, for files that are not options of this program. Raises UserError."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(" ".join(str(error).split())) from None


def yaml_texts(text: str, path: str) -> Any:
    """Returns the texts, lists and mappings of YAML or JSON. Raises UserError for what is none."""
    try:
        return yaml.load(text, Loader=_TextLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path} is not YAML that is read here: {' '.join(str(error).split())}") from None


class _TextLoader(yaml.BaseLoader):
    """Makes texts, lists and mappings alone, without aliases, as it reads: deep ones end it soon."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias (*NAME): write the values out")
        return super().compose_node(parent, index)


def _settings(path: str, node: yaml.MappingNode, prefix: str) -> Iterator[Setting]:
    """Yields the options of a mapping, by dotted keys. Scalars and the items of lists are texts; null is None."""
    for key_node, value in node.value:
        key, where = f"{prefix}{key_node.value}", f"{path}, line {key_node.start_mark.line + 1}: "
        if isinstance(value, yaml.MappingNode) and key != TEMPLATE_KWARGS:
            yield from _settings(path, value, f"{key}.")
            continue
        text = value.value
        if not value.tag.startswith(TAG):
            raise UserError(f"{where}{key} has the tag {value.tag}, which is not read: write the value alone")
        if isinstance(value, yaml.MappingNode):
            for name, _ in value.value:
                name.tag = f"{TAG}str"  # `on` is a name, and not `true`
            text = json.dumps(yaml.SafeLoader("").construct_document(value), default=str)
        elif isinstance(value, yaml.SequenceNode):
            text = [item.value for item in value.value]
            if not all(isinstance(item, str) for item in text):
                raise UserError(f"{where}{key} has a list of something else than texts and numbers: write [a, b]")
        elif value.tag.endswith(":null"):
            text = None
        yield Setting("strategy" if key == STRATEGY_NAME else key, text, where, WORDS)


class _Dumper(yaml.SafeDumper):
    """Writes lists in one line, and texts with line breaks and the like between double quotes."""


_Dumper.add_representer(list, lambda dumper, items: dumper.represent_sequence(f"{TAG}seq", items, flow_style=True))
_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar(f"{TAG}str", text, style=None if text.isprintable() else '"')
)


def to_text(values: Mapping[str, Any]) -> str:
    """Returns plain values, options in their groups (`config.resolved`), as a file that can be given back."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)
    return text.removesuffix("\n")
