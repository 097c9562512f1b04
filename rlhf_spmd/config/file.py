"""Files of `--config`: YAML, in which nested keys are the dotted names of options. Reads them and writes them.

A value is read as the text that stands in the file, so it means what it means on the command line: `1e-3` is a number
where a number is wanted, and `on` or `no` is a text where a text is wanted. The only values of YAML's own are null,
lists, and what the mapping of data.chat_template_kwargs holds. PyYAML is imported when a file is read; nothing is
constructed from tags.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

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
NULLS = ("", "~", "null", "Null", "NULL")
TAGS = ("str", "int", "float", "bool", "null", "seq", "map", "timestamp", "value")  # that plain YAML has
MOST_GROUPS = 1  # around an option
BY_ROLE = "lora."  # in this group, roles may be groups, too
MOST_DEEP = 20  # values in values of a foreign file
MOST_VALUES = 1000  # in an option that is a mapping
PLAIN = re.compile(r"[A-Za-z_/.][\w/.,:=@+-]*(?<!:)", re.ASCII)  # texts that need no quotes
QUOTED = ("y", "n", "yes", "no", "on", "off", "true", "false", "null", ".", "..", "---", "...", ".inf", ".nan")


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
    import yaml

    text = _text_of(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            raise UserError(f"{path} is empty: write options into it, such as `iterations: 3`")
        if not isinstance(root, yaml.MappingNode):
            raise UserError(f"{path} holds {_kind(root)}, not options: write lines such as `iterations: 3`")
        found = list(_flat(path, root, ""))
    except yaml.YAMLError as error:
        raise UserError(_problem(path, text, error)) from None
    except RecursionError:
        raise UserError(f"{path} is nested too deep: an option has at most one group around it") from None
    settings: dict[str, Setting] = {}
    for one in found:
        if one.key in settings:
            raise UserError(
                f"{one.where}{one.key} is already given in {settings[one.key].where[len(path) + 2 : -2]}; drop one"
            )
        settings[one.key] = one
    words = {name: settings.pop(name) for name in WORDS if name in settings}
    for one in words.values():
        if one.value is not None and not (one.value and isinstance(one.value, str)):
            raise UserError(f"{one.where}{one.key} must be one text, e.g. {one.key}: NAME")
    page, of_run = Path(path).with_name(PAGE), Path(path).name == CONFIG
    given = {name: str(one.value) for name, one in words.items() if one.value}
    return ConfigFile(path, given, tuple(settings.values()), str(page) if of_run and is_file(page) else None, of_run)


def yaml_value(text: str) -> Any:
    """Reads YAML into plain values, for files that are not options of this program. Raises UserError."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(" ".join(str(error).split())) from None


def yaml_texts(text: str, path: str) -> Any:
    """Returns the texts, lists and mappings of YAML or JSON. Raises UserError for what is none."""
    import yaml

    depth = 0
    try:
        for event in yaml.parse(text):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_DEEP or isinstance(event, yaml.AliasEvent):
                raise UserError(f"{path} is nested too deep, or has an alias (*NAME): write the values out")
        return yaml.load(text, Loader=yaml.BaseLoader)  # makes texts, lists and mappings alone
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None


def _text_of(path: str) -> str:
    if not path:
        raise UserError("--config is empty: give a file (a variable that is not set?)")
    try:
        content = read_bytes(path).removeprefix(b"\xef\xbb\xbf")
        text = content.decode()
        return _json_as_yaml(text) if path.endswith(".json") else text
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        raise UserError(f"{path}, line {line}: byte {column} is not UTF-8: save the file as UTF-8") from None
    except OSError as error:
        where = f" (looked in {Path.cwd()})" if isinstance(error, FileNotFoundError) else ""
        raise UserError(f"--config {path} can't be read: {error.strerror or error}{where}; give a file") from None


def _json_as_yaml(text: str) -> str:
    """Rewrites JSON in those of its spellings that YAML shares: no tabs between values, no odd characters inside
    them."""
    kept = (char if char.isprintable() or char in "\r\n" else " " if char == "\t" else _escaped(char) for char in text)
    return "".join(kept)


def _problem(path: str, text: str, error: Any) -> str:
    """Returns a message for a file that is not YAML."""
    mark = getattr(error, "problem_mark", None)
    line = mark.line + 1 if mark else text.count("\n", 0, getattr(error, "position", 0)) + 1
    lines = text.split("\n")
    shown = lines[line - 1] if line <= len(lines) else ""
    if "\t" in shown[: len(shown) - len(shown.lstrip())]:
        return f"{path}, line {line}: the line begins with a tab: indent with spaces"
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    column = f", column {mark.column + 1}" if mark else ""
    if "expected a single document" in str(error):
        return f"{path}, line {line}: a second document begins here: keep one"
    return f"{path}, line {line}{column}: not valid YAML ({what}): write `key: value`, with quotes around odd texts"


def _flat(path: str, node: Any, prefix: str) -> Iterator[Setting]:
    """Yields the options of a mapping, by dotted keys."""
    seen: dict[str, int] = {}
    for key_node, value in node.value:
        where = f"{path}, line {key_node.start_mark.line + 1}"
        if key_node.tag == "tag:yaml.org,2002:merge":
            raise UserError(f"{where}: merge keys (<<) are not read: write the options out")
        name = key_node.value if _is_text(key_node) else ""
        if not name or name.strip(".") != name:
            raise UserError(f"{where}: {_kind(key_node)} {name!r} is not the name of an option")
        key, line = prefix + name, key_node.start_mark.line + 1
        if name in seen:
            raise UserError(f"{where}: {key} is already given in line {seen[name]}; drop one")
        seen[name] = line
        if key == TEMPLATE_KWARGS and value.tag.endswith(":map"):
            yield Setting(key, json.dumps(_object(where, key, value, count())), f"{where}: ", WORDS)
        elif hasattr(value, "value") and isinstance(value.value, list) and value.tag.endswith(":map"):
            if prefix.count(".") >= MOST_GROUPS + prefix.startswith(BY_ROLE):
                raise UserError(f"{where}: {key} holds more options: an option has at most one group around it")
            yield from _flat(path, value, f"{key}.")
        else:
            name = "strategy" if key == STRATEGY_NAME else key
            yield Setting(name, _value(where, key, value), f"{where}: ", WORDS)


def _value(where: str, key: str, node: Any) -> str | list[str] | None:
    """Returns a text, the texts of a list, or None for null."""
    if isinstance(node.value, str):
        return _text(where, key, node)
    items = [_text(where, key, item) if _is_text(item) else None for item in node.value]
    texts = [item for item in items if item is not None]
    if not node.tag.endswith(":seq") or len(texts) < len(items):
        raise UserError(f"{where}: {key} has a list of something else than texts and numbers: write [a, b]")
    return texts


def _text(where: str, key: str, node: Any) -> str | None:
    """Returns a text, or None for null."""
    if not _is_text(node):
        raise UserError(f"{where}: {key} has the tag {node.tag}, which is not read: write the value alone")
    if node.style is None and node.value in NULLS:
        return None
    try:
        encoded: bytes = node.value.encode("utf-16", "surrogatepass")
        return encoded.decode("utf-16")  # JSON may write a character as a pair
    except UnicodeDecodeError:
        raise UserError(f"{where}: {key} has half a surrogate pair: write the character itself") from None


def _object(where: str, key: str, node: Any, number: Iterator[int]) -> Any:
    """Returns what a node means in YAML: a mapping, a list, a truth value (also `off`), a number, null, or text.
    number: of the values so far, which aliases can multiply."""
    if next(number) > MOST_VALUES:
        raise UserError(f"{where}: {key} holds more than {MOST_VALUES} values")
    if node.tag.endswith(":map") and isinstance(node.value, list):
        found: dict[str, Any] = {}
        for name_node, value in node.value:
            name = _text(where, key, name_node) if _is_text(name_node) else None
            if name is None or name in found:
                what = f"{name!r} twice" if name in found else f"{_kind(name_node)} as a name"
                raise UserError(f"{where}: {key} has {what}: write `name: value`, each name once")
            found[name] = _object(where, key, value, number)
        return found
    if node.tag.endswith(":seq") and isinstance(node.value, list):
        return [_object(where, key, item, number) for item in node.value]
    text = _text(where, key, node)
    if node.style is not None or text is None:
        return text
    if node.tag.endswith(":bool"):
        return text.lower() in ("true", "yes", "on")
    with suppress(ValueError):
        return json_value(text)
    if node.tag.endswith((":int", ":float")):
        raise UserError(f"{where}: {key} has {text}: write a number as JSON does, such as 0.5, or put it into quotes")
    return text


def _is_text(node: Any) -> bool:
    """Returns whether this is a scalar without a tag of its own."""
    return isinstance(node.value, str) and node.tag.removeprefix("tag:yaml.org,2002:") in TAGS


def _kind(node: Any) -> str:
    return "a text" if isinstance(node.value, str) else "a list" if node.tag.endswith(":seq") else "a mapping"


# ---- writing ---------------------------------------------------------------------------------------------------------


def to_text(values: Mapping[str, Any]) -> str:
    """Returns plain values, options in their groups (`config.resolved`), as a file that can be given back. Needs no
    PyYAML, whose import takes longer than the rest of `check`'s output."""
    lines = []
    for key, value in values.items():
        group = value if isinstance(value, Mapping) else {}
        lines += [f"{_scalar(key)}:" if group else f"{_scalar(key)}: {_scalar(value)}"]
        lines += [f"  {_scalar(name)}: {_scalar(inner)}" for name, inner in group.items()]
    return "\n".join(lines)


def _scalar(value: Any, *, may_be_plain: bool = True) -> str:
    """Returns a value in one line. may_be_plain: texts need no quotes where they can be nothing else."""
    if isinstance(value, Mapping):  # as _object reads it
        parts = (f"{_quoted(name)}: {_scalar(inner, may_be_plain=False)}" for name, inner in value.items())
        return "{" + ", ".join(parts) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(_scalar(item, may_be_plain=may_be_plain) for item in value)}]"
    if not isinstance(value, str):
        return json.dumps(value)  # numbers, booleans and null are the same in YAML
    is_plain = PLAIN.fullmatch(value) and value.lower() not in QUOTED and "," not in value
    return value if may_be_plain and is_plain else _quoted(value)


def _quoted(text: str) -> str:
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(char: str) -> str:
    """Escapes a character for double quotes."""
    return "\\" + char if char in '"\\' else char if char.isprintable() else f"\\U{ord(char):08x}"
