"""Trees of options: frozen dataclasses, whose fields are options, or groups of options that are dataclasses again.

A tree gives the dotted keys of its options, their types, values and meanings, copies with other values, and the errors
for keys and values that it does not take. The meaning of an option is the comment after its field, or
the lines of comment above it.
"""

import ast
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args, get_type_hints

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.option_suggestions import suggest_option
from rlhf_spmd.pages.option_values import Given, parse_value

CAPITALS, COMMENT = re.compile("[A-Z]+"), re.compile(r"\s*#.*")


class ByName(NamedTuple):
    """Marks a field that is a mapping with an option, or a group of options, for each name.

    form: of their keys; capitals stand for a name.
    """

    form: str


class OptionTree:
    """The base of the root of a tree. OPEN: groups whose options are not known to the tree. NO_OPTIONS: other fields
    that are not options."""

    __slots__ = ()
    OPEN: ClassVar[tuple[str, ...]] = ()
    NO_OPTIONS: ClassVar[tuple[str, ...]] = ()

    def group_name(self, field: str) -> str:
        """Returns the name of the group in a field."""
        return field


Tree = TypeVar("Tree", bound=OptionTree)


class Option(NamedTuple):
    """An option of a tree.

    path: the attributes, and the name in a mapping, that lead to its value.
    owner: the class of its field.
    field: the name of its field.
    form: of ByName, else empty.
    """

    annotation: Any
    value: Any
    path: tuple[str, ...]
    owner: type
    field: str
    form: str = ""

    @property
    def meaning(self) -> str:
        """What the comment on its field says."""
        return comments_of(self.owner).get(self.field, "")


class Setting(NamedTuple):
    """A value that a user gives an option.

    where: the place in a file, for messages; empty: the command line.
    also: what can be named there besides options, for suggestions.
    """

    key: str
    value: Given
    where: str = ""
    also: Sequence[str] = ()


def options_of(tree: OptionTree) -> dict[str, Option]:
    """Returns the options by their dotted keys."""
    return dict(_options(tree, tree.group_name, (*tree.OPEN, *tree.NO_OPTIONS)))


def keys_of(tree: OptionTree) -> list[str]:
    """Returns every key that may be set, and the groups whose options are not known."""
    return [*options_of(tree), *tree.OPEN]


def _options(
    node: Any,
    group_name: Callable[[str], str] = str,
    besides: Sequence[str] = (),
    path: tuple[str, ...] = (),
    prefix: str = "",
    form_prefix: str = "",
) -> Iterator[tuple[str, Option]]:
    """Yields the options below a node, which `path` leads to. prefix: of their keys, and of their forms."""
    cls: type = node.__class__
    for part, annotation, form in _fields(cls):
        if part.name in besides:
            continue
        place, value = (*path, part.name), getattr(node, part.name)
        values = {place: (group_name(part.name), value)}
        if form:
            values = {(*place, name): (CAPITALS.sub(name, form), inner) for name, inner in value.items()}
        for inner_path, (name, inner) in values.items():
            key, whole_form = f"{prefix}{name}", f"{form_prefix}{form or name}"
            if is_dataclass(inner):
                yield from _options(inner, path=inner_path, prefix=f"{key}.", form_prefix=f"{whole_form}.")
            else:
                yield (
                    key,
                    Option(annotation, inner, inner_path, cls, part.name, "" if whole_form == key else whole_form),
                )


@cache
def _fields(cls: type) -> list[tuple[Field[Any], Any, str]]:
    """Returns the fields of a dataclass, each with the type of its value, or of its values by name, and the form of
    ByName."""
    hints, parts = get_type_hints(cls, include_extras=True), []
    for part in fields(cls):
        annotation, form = hints[part.name], ""
        for by_name in getattr(annotation, "__metadata__", ()):
            if isinstance(by_name, ByName):
                annotation, form = get_args(get_args(annotation)[0])[1], by_name.form
        parts.append((part, annotation, form))
    return parts


@cache
def comments_of(cls: type) -> dict[str, str]:
    """Returns the comment on each field of a class and of those that it derives from: the one after it on its last
    line, or else the lines of comment directly above it."""
    comments: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        lines = inspect.getsource(base).split("\n")
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                above = itertools.takewhile(COMMENT.match, reversed(lines[: node.lineno - 1]))
                after = COMMENT.match(lines[(node.end_lineno or 1) - 1][node.end_col_offset or 0 :])
                texts = [after[0]] if after else [*above][::-1]
                comments[node.target.id] = " ".join(text.lstrip("# ") for text in texts)
    return comments


def with_value(tree: Tree, key: str, value: Any) -> Tree:
    """Returns a copy with one option set; key: of `options_of`, value: of the option's type."""
    changed: Tree = _changed(tree, options_of(tree)[key].path, value)
    return changed


def _changed(node: Any, path: Sequence[str], value: Any) -> Any:
    name, *rest = path
    is_mapping = isinstance(node, Mapping)
    if rest:
        value = _changed(node[name] if is_mapping else getattr(node, name), rest, value)
    return {**node, name: value} if is_mapping else replace(node, **{name: value})


def assigned(tree: Tree, setting: Setting) -> Tree:
    """Returns a copy with one option set. A group that is None changes nothing. Raises UserError for an unknown key or
    a wrong value."""
    key, known = setting.key, options_of(tree)
    if key in known:
        changed: Tree = _changed(tree, known[key].path, parse_value(known[key].annotation, setting.value, key))
        return changed
    of_group = [name for name in known if name.startswith(f"{key.partition('.')[0]}.")]
    if of_group and "." not in key:
        if setting.value is None:
            return tree
        raise UserError(f"{key!r} is a group of options; set one of {', '.join(of_group)}")
    here = of_group or list(dict.fromkeys(name.partition(".")[0] for name in keys_of(tree)))
    hint = suggest_option(key, [*here, *setting.also], [*keys_of(tree), *setting.also])
    known_here = f"; known here: {', '.join(here)} (`rlhf-spmd options {key}` searches their meanings)"
    raise UserError(f"unknown option {key!r}{hint or known_here}")


def settings_of(words: Iterable[str]) -> list[Setting]:
    """Returns the settings in KEY=VALUE words. Raises UserError."""
    settings = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise UserError(f"argument {word!r} is not of the form KEY=VALUE, e.g. generation.temperature=0.7")
        settings.append(Setting(key, text))
    return settings


def with_settings(tree: Tree, settings: Iterable[Setting], assign: Callable[[Tree, Setting], Tree] = assigned) -> Tree:
    """Returns a copy with these settings, the later of two for an option. assign: sets one. Raises UserError, which has
    a line for each setting that is wrong."""
    problems = []
    for setting in settings:
        try:
            tree = assign(tree, setting)
        except UserError as error:
            problems.append(f"{setting.where}{error}")
    if problems:
        raise UserError("\n".join(problems))
    return tree
