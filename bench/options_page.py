"""Writes docs/options.md: every option with its type, its default and its meaning, read from the code.

The options of a run and of `generate` are fields of dataclasses; a field's meaning is the comment behind it. The
options of a strategy are arguments of its place(), whose docstring says `name: meaning.` of each, and fields of its
OPTIONS.

Cost: none. Command: python -m bench tables, which writes this page too. A unit test fails when the page is not current.
"""

import ast
import collections.abc
import dataclasses
import inspect
import io
import re
import tokenize
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import JsonValue
from pydantic.fields import FieldInfo

from bench.rows import REPOSITORY
from rlhf_spmd.config import options as configs
from rlhf_spmd.config import presets
from rlhf_spmd.pages.algorithm import Algorithm, algorithm_names, load_algorithm
from rlhf_spmd.pages.option_suggestions import ELSEWHERE
from rlhf_spmd.pages.strategy import load_strategy, strategy_names
from rlhf_spmd.runtime.offline import options as offline_options

PAGE = REPOSITORY / "docs" / "options.md"
HEAD = """# Options

*`python -m bench tables` writes this page from the code; do not edit it.*

Options are `KEY=VALUE` words on the command line, for example `iterations=3 ppo.kl_coef=0.02 strategy.zero=2`. `none`
stands for no value, and lists are separated by commas. The program rejects an unknown option and suggests known ones,
also for names of [TRL, verl and OpenRLHF](coming_from.md). Options with two dashes, such as `--model`, are listed by
`python -m rlhf_spmd train --help`.

## A file of options

`train`, `precompute`, `check`, `plan`, `forecast`, `draw`, `profile` and `generate` read options from `--config
FILE.yaml`, too. Words of the command line replace those of the file, and the file replaces those of the preset.

```yaml
algorithm: grpo
model: path/to/model
strategy:
  name: separation          # or, without options, `strategy: separation`
  zero: 1
layout: 1x8                 # for check, plan, forecast and draw; train takes the ranks that it is started on
iterations: 200
grpo:
  kl_coef: 1e-3             # grpo.kl_coef
data:
  prompts: [gsm8k.jsonl, math.jsonl]
```

- Nested keys are the dotted names of options; `optimizer.actor_lr: 1e-6` in one line is the same. `preset`,
  `algorithm`, `model`, `strategy`, `layout`, `cluster`, `calibration`, `runs` and `name` stand for the options with two
  dashes. A verb ignores those that it does not have.
- A value means what its text means on the command line: `1e-3` is a number, and `on` is a text where a text is wanted.
  `null` is `none`, or empty. A list may stand for commas; `generation.stop: ["a, b"]` is then one text.
- `data.chat_template_kwargs` holds a mapping, in which values mean what they mean in YAML: `off` is false.
- Paths are relative to the folder in which the program is started.
- `--strategy` with another name leaves out the `strategy` options of the file, `--algorithm` those of its algorithm,
  and `plan` those of its strategy.
- `check` and `train --dry-run` print the resolved configuration as such a file. `config.json` of a run folder is one,
  too: `train --config runs/NAME/config.json` begins the same run again. What such a `config.json` names as code (an
  algorithm or strategy in a `.py` file, a reward function) is run by `train` and `precompute`, which say so. `check`,
  `plan`, `forecast`, `draw`, `profile` and `train --dry-run` do not run it until you name it yourself, such as
  `--algorithm runs/NAME/algorithm.py`; `check` says what it left out.
"""
RUN = """
## Options of a run

`train`, `precompute`, `check`, `plan` and `profile` take these. The defaults below hold for all presets but where
[Presets](#presets) names another value.
"""
PRESETS = """
## Presets

`--preset NAME` chooses a preset. Without it, `train` uses `tiny`, or `model` if `--model FOLDER` is given. The
table has the options of a run of `ppo` whose value differs from the default. The lengths of `model` are half of the
model's context, but at most the number shown, and its `dtype` is `bfloat16` on GPUs. `llama-13b` to `llama-70b` differ
from `llama-7b` in `shape` only; they have no weights and serve `check` and `plan`.

With `--preset tiny --model FOLDER` everything else still comes from the preset, whose values suit a toy; also set
prompts, reward, lengths and learning rates.

`tiny` has rows for `sft`, `reward_model` and `dpo`, too, and held-out rows, which are evaluated every five iterations
unless `data.prompts` names other rows. `sft` starts from an embedded base model that writes poorly, the others start
from the actor.
"""
OFFLINE = """
## Options of generate

A line of a `.jsonl` file of prompts may set some of these for its own prompt; see [Generation](generation.md). From a
file of `--config`, `generate` reads these and `model`. It ignores the other options of a training run there.
"""
ALGORITHMS = """
## Options of the algorithms

`--algorithm NAME` chooses one; without it, it is `ppo`. `--model FOLDER` sets the folder of the first model. A model
without a folder of its own is read from the first one in the table that has the first model's tokenizer. A model that
puts out one number for each token (`scalar`) and is trained begins with zeros where its folder has no such head.
"""
STRATEGIES = """
## Options of the strategies

Written `strategy.NAME=VALUE`. [Strategies](strategies.md) says what each strategy does.
"""
NO_OPTIONS = ("preset", "algorithm", "options")  # --preset and --algorithm, and what those have
BY_ROLE = {"lr": "ROLE_lr", "models": "models.ROLE", "strategy": "strategy.NAME"}  # fields that are options by name
SHOWN_PRESETS = ("tiny", "model", "smollm2", "llama-7b")


def page() -> str:
    """The page as it has to be."""
    parts = [HEAD, RUN, *_tables(configs.Config), ALGORITHMS]
    for name in algorithm_names():
        parts += [f"\n### {name}\n\n", *_tables_of_algorithm(load_algorithm(name))]
    parts += [
        PRESETS,
        _table_of_presets(),
        OFFLINE,
        *_tables(offline_options.GenerateOptions, " of generate"),
        STRATEGIES,
    ]
    for name in strategy_names():
        rows = [_row(*option) for option in strategy_options(name)]
        parts += [f"\n### {name}\n\n", _lines(("option", "type", "default", "meaning"), rows)]
    return "".join(parts)


def names_elsewhere() -> tuple[dict, list[dict[str, Sequence[str]]]]:
    """A table of names in other systems, for docs/coming_from.md: its columns, and a row for what means the same."""

    def listed(key: str) -> Callable[[Mapping], str]:
        return lambda row: ", ".join(f"`{one}`" for one in row[key])

    alike: dict[tuple[str, ...], list[str]] = {}
    for name, ours in ELSEWHERE.items():
        alike.setdefault(ours, []).append(name)
    rows = [{"elsewhere": names, "here": ours} for ours, names in alike.items()]
    return {"there": listed("elsewhere"), "here": listed("here")}, rows


def _tables(cls: type, verb: str = "") -> list[str]:
    """A table of the plain fields of a dataclass, then one for each group of fields. verb: added to their titles."""
    fields = [field for field in dataclasses.fields(cls) if field.name not in NO_OPTIONS]
    groups = [field for field in fields if dataclasses.is_dataclass(field.type)]
    rows = [_row(*option) for option in fields_of(cls) if option[0] not in {field.name for field in groups}]
    head = ("option", "type", "default", "meaning")
    parts = ["\n", _lines(head, rows)]
    for group in groups:
        rows = [_row(f"{group.name}.{name}", *rest) for name, *rest in fields_of(group.type)]
        parts += [f"\n### {group.name}{verb}\n\n", _lines(head, rows)]
    return parts


def _tables_of_algorithm(algorithm: Algorithm) -> list[str]:
    """The models of an algorithm, and its options."""
    rates = configs.Config(preset="", algorithm=algorithm).optimizer.lr
    rows = []
    for name, role in algorithm.roles.items():
        rate = f"`optimizer.{name}{configs.LR}={rates[name]}`" if name in rates else "-"
        empty = ", else ".join(f"the {other}'s folder" for other in role.starts_from)
        if name == next(iter(algorithm.roles)):
            empty = "that of `--model` or the preset"
        elif role.judge:
            empty = "none: a reward function scores"
        rows.append([f"`models.{name}`", role.head, rate, empty[:1].upper() + empty[1:]])
    options = [_row(f"{algorithm.name}.{name}", *rest) for name, *rest in fields_of(algorithm.options)]
    head = ("model", "head", "learning rate", "where the folder is empty")
    return [_lines(head, rows), "\n", _lines(("option", "type", "default", "meaning"), options)]


def fields_of(cls: type) -> list[tuple[str, Any, Any, str]]:
    """Name, type, default and meaning of each field of a dataclass, those that it inherits first."""
    hints, found = get_type_hints(cls, include_extras=True), {}
    for base in reversed(cls.__mro__[:-1]):
        found |= _comments(base)
    named = [field for field in dataclasses.fields(cls) if field.name not in NO_OPTIONS]
    return [
        (BY_ROLE.get(field.name, field.name), hints[field.name], _default(field), found.get(field.name, ""))
        for field in named
    ]


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return "" if field.default is dataclasses.MISSING else field.default


def _comments(cls: type) -> dict[str, str]:
    """The comment behind each field of a class."""
    source = inspect.getsource(cls)
    by_line = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    body = ast.parse(source).body[0].body
    return {one.target.id: by_line.get(one.end_lineno, "") for one in body if isinstance(one, ast.AnnAssign)}


def strategy_options(name: str) -> list[tuple[str, Any, Any, str]]:
    """Name, type, default and meaning of each option of a strategy."""
    strategy = load_strategy(name)
    meanings = _meanings(name) | (_comments(strategy.further) if strategy.further else {})
    return [(one.name, one.annotation, one.default, meanings[one.name]) for one in strategy.parameters.values()]


def _meanings(name: str) -> dict[str, str]:
    """What the docstring of a strategy's place() says of each option."""
    strategy = load_strategy(name)
    text = " ".join(inspect.getdoc(strategy.place).split())
    options = "|".join(strategy.parameters)
    parts = re.split(rf"(?:^|(?<=\. ))({options}): ", text)[1:]
    return {option: text.strip() for option, text in zip(parts[::2], parts[1::2], strict=True)}


def _table_of_presets() -> str:
    """The options that presets set."""
    values = {name: _values(presets.load(name)) for name in SHOWN_PRESETS}
    defaults = _values(configs.Config(preset=""))
    keys = [key for key in defaults if any(values[name][key] != defaults[key] for name in values) and key != "preset"]
    rows = []
    for key in keys:
        cells = (values[name][key] if values[name][key] != defaults[key] else None for name in values)
        rows.append([f"`{key}`", *("" if value is None else value_text(value) for value in cells)])
    return "\n" + _lines(("option", *(f"`{name}`" for name in SHOWN_PRESETS)), rows)


def _values(config: configs.Config) -> dict[str, Any]:
    """The value of each option by its dotted key."""
    return {key: value for key, (_, value) in configs.options_of(config).items()}


def _row(name: str, annotation: Any, default: Any, meaning: str) -> list[str]:
    meaning = meaning.rstrip(".").replace("None: ", "`none`: ")
    return [f"`{name}`", type_text(annotation), value_text(default), meaning[:1].upper() + meaning[1:]]


def value_text(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None:
        return "`none`"
    if isinstance(value, Mapping) or value in ("", ()):
        return "-"
    if isinstance(value, str) and str(REPOSITORY) in value:
        return "embedded"  # a file of the package
    text = ",".join(value) if isinstance(value, tuple) else str(value).lower() if isinstance(value, bool) else value
    return f"`{text}`"


def type_text(annotation: Any) -> str:
    """A type in words: `whole number, at least 1`."""
    if get_origin(annotation) is Annotated:
        inner, *extras = get_args(annotation)
        bounds = [one for extra in extras for one in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
        words = ", ".join([type_text(inner), *filter(None, map(_bound, bounds))])
        return words.replace("whole number, above 0", "whole number, at least 1")
    if get_origin(annotation) in (Union, types.UnionType):
        parts = [type_text(one) for one in get_args(annotation) if one is not type(None)]
        return " or ".join([*parts, "`none`"])
    if get_origin(annotation) is Literal:
        return " ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is tuple:
        return _tuple_text(get_args(annotation))
    if get_origin(annotation) in (dict, collections.abc.Mapping):
        of_values = get_args(annotation)[1]
        return {Any: "any", JsonValue: "object of JSON"}.get(of_values) or type_text(of_values)
    return {int: "whole number", float: "number", bool: "`true` `false`", str: "text"}[annotation]


def _tuple_text(parts: tuple[Any, ...]) -> str:
    """Values with commas: any number of one type (`texts`), or a fixed number (`2 numbers, each above 0`)."""
    is_open = parts[-1] is Ellipsis
    inner, _, bounds = type_text(parts[0]).partition(", ")
    assert is_open or len(set(parts)) == 1, f"there are no words for {parts}"
    many = inner.replace("number", "numbers").replace("text", "texts")
    return ("" if is_open else f"{len(parts)} ") + many + (f", each {bounds}" if bounds else "")


def _bound(one: Any) -> str:
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    found = next((name for name in words if getattr(one, name, None) is not None), None)
    if found is None:
        return ""
    limit = getattr(one, found)
    return f"{words[found]} {'2^64' if limit == 2**64 else limit}"


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"
