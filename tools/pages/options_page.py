"""Writes docs/options.md: every option with its type, its default and its meaning, read from the code.

The options of a run and of `generate` are trees (rlhf_spmd/pages/option_tree.py), which have their meanings. The
options of a strategy are arguments of its place(), whose docstring says `name: meaning.` of each, and fields of its
OPTIONS.

Cost: none. Command: python -m tools pages. A unit test fails when the page is not current.
"""

import collections.abc
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import JsonValue
from pydantic.fields import FieldInfo

from bench.columns import Columns
from bench.rows import REPOSITORY
from rlhf_spmd.config import options as configs
from rlhf_spmd.config import presets
from rlhf_spmd.pages import other_names
from rlhf_spmd.pages.algorithm import Algorithm, algorithm_names, load_algorithm
from rlhf_spmd.pages.option_tree import Option, OptionTree, options_of
from rlhf_spmd.pages.option_values import text_of
from rlhf_spmd.pages.strategy import load_strategy, strategy_names
from rlhf_spmd.runtime.offline.options import GenerateOptions

PAGE = REPOSITORY / "docs" / "options.md"
HEAD = """# Options

<!-- `python -m tools pages` writes this page from the code; do not edit it. -->

Options are `KEY=VALUE` arguments, for example `iterations=3 ppo.kl_coef=0.02 strategy.zero=2`. `none` stands for no
value, and lists are separated by commas. The program rejects an unknown option and suggests known ones, also for names
of [TRL, verl and OpenRLHF](coming_from.md). All wrong ones, of the command line and of a file, are named at once.
`rlhf-spmd train --help` lists the arguments with two dashes and the options used most, `rlhf-spmd options kl
--algorithm grpo` the options of GRPO that have *kl* in their name or meaning.

## A file of options

`train`, `evaluate`, `check`, `plan`, `forecast`, `draw`, `rehearse`, `profile` and `generate` read
options from `--config FILE.yaml`, too. Arguments on the command line take precedence over the file, and the file over
the preset.

```yaml
algorithm: grpo
model: path/to/model
strategy:
  name: flattening          # or, without options, `strategy: flattening`
  zero: 1
layout: 1x8                 # for check, plan, forecast, draw and rehearse; train takes the ranks that it is started on
iterations: 200
grpo:
  kl_coef: 1e-3             # grpo.kl_coef
data:
  prompts: [gsm8k.jsonl, math.jsonl]
```

- Nested keys are the dotted names of options; `optimizer.actor_lr: 1e-6` in one line is the same. `preset`,
  `algorithm`, `model`, `strategy`, `layout`, `cluster`, `calibration`, `runs` and `name` stand for the options with two
  dashes. A subcommand ignores those that it does not have.
- A value means what its text means on the command line: `1e-3` is a number, and `on` is a text where a text is wanted.
  `null` is `none`, or empty. A list may stand for commas; `generation.stop: ["a, b"]` is then one text.
- `data.chat_template_kwargs` holds a mapping, in which values mean what they mean in YAML: `off` is false.
- Paths are relative to the folder in which the program is started.
- `--strategy` with another name leaves out the `strategy` options of the file, `--algorithm` those of its algorithm,
  and `plan` those of its strategy.
- `--show-config` of `check` and `train --dry-run` prints the resolved configuration as such a file. `config.json` of a
  run folder is one, too: `train --config runs/NAME/config.json` begins the same run again. What such a `config.json`
  names as code (an algorithm or strategy in a `.py` file, a reward function) is run by `train` and `evaluate`,
  which say so. `check`, `plan`, `forecast`, `draw`, `profile` and `train --dry-run` do not run it until you name it
  yourself, such as `--algorithm runs/NAME/algorithm.py`. `check` imports reward functions that its command line names,
  and no others.
"""
RUN = """
## Options of a run

`train`, `evaluate`, `check`, `plan`, `forecast`, `draw`, `rehearse` and `profile` take these, those of
the [algorithm](#options-of-the-algorithms) and those of the [strategy](#options-of-the-strategies). The defaults below
hold for all presets but where [Presets](#presets) names another value.
"""
PRESETS = """
## Presets

`--preset NAME` chooses a preset. Without it, `train` uses `tiny`, or `model` if `--model FOLDER` is given. The
table has the options of a run of `ppo` whose value differs from the default. `arithmetic` and `tools` (two tools over
several turns) train by `grpo` unless `--algorithm` names another one; `arithmetic` then has `samples_per_prompt=8` and
`rollout_batch=64`. The lengths of `model` are
half of the model's context, but at most the number shown, and its `dtype` is `bfloat16` on GPUs. `llama-13b` to
`llama-70b` and `qwen2.5-0.5b` to `qwen2.5-32b` differ from `llama-7b` in `shape` only. They have no weights, and
serve `check`, `plan` and, with `--random-weights`, to measure `train`.

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
HEADING = ("option", "type", "default", "meaning")
TRAINERS = {  # program -> the algorithms here of which it has a trainer
    "trl": ("grpo", "rloo", "ppo", "sft", "reward_model", "dpo"),
    "verl": ("ppo", "grpo", "rloo", "remax", "reinforce_plus_plus", "sft"),
    "openrlhf": ("ppo", "grpo", "rloo", "reinforce_plus_plus", "sft", "reward_model", "dpo"),
}
SHOWN_PRESETS = ("tiny", "arithmetic", "tools", "model", "smollm2", "llama-7b")


def page() -> str:
    """Returns the page as it has to be."""
    config = configs.Config(preset="")
    parts = [HEAD, RUN, *_tables(config, besides=("preset", config.algorithm.name)), ALGORITHMS]
    for name in algorithm_names():
        parts += [f"\n### {name}\n\n", *_tables_of_algorithm(load_algorithm(name))]
    parts += [
        PRESETS,
        _table_of_presets(),
        OFFLINE,
        *_tables(GenerateOptions(), " of generate"),
        STRATEGIES,
    ]
    for name in strategy_names():
        rows = [_cells(*option) for option in strategy_options(name)]
        parts += [f"\n### {name}\n\n", _lines(HEADING, rows)]
    return "".join(parts)


def names_elsewhere(program: str) -> tuple[Columns, list[dict]]:
    """Returns the names of options of another program, for docs/coming_from_PROGRAM.md: columns, and a row for what
    means the same."""

    def listed(key: str) -> Callable[[Mapping], str]:
        return lambda row: ", ".join(f"`{one}`" for one in dict.fromkeys(row[key]))

    rows: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for name in other_names.names():
        if name.kind == "option" and name.theirs[program]:
            rows.setdefault(name.ours, {"here": [*name.ours], "there": []})["there"] += name.theirs[program]
    return {other_names.PROGRAMS[program]: listed("there"), "here": listed("here")}, list(rows.values())


def defaults_elsewhere(program: str) -> tuple[Columns, list[dict]]:
    """Returns the defaults of another program that are not those here: columns, and a row for what is the same
    there."""
    found: dict[str, dict] = {}  # by the row of other_names.toml
    for name in TRAINERS[program]:
        ours = _values(presets.load("model", algorithm=name))
        for row in other_names.defaults(program, name):
            named = other_names.find(program, row.get("there", ""))
            own = [key for one in named if not one.of or name in one.of for key in one.ours]
            keys = [key.replace("*", name) for key in own or row.get("ours", "").split()]
            if known := [key for key in keys if key in ours]:
                cells = found.setdefault(str(row), {"options": [], "value": row["value"], "here": [], "of": []})
                cells["options"] += [row["there"]] if named else [key.replace(f"{name}.", "*.") for key in known]
                cells["here"] += [f"{ours[key]:g}" if type(ours[key]) is float else text_of(ours[key]) for key in known]
                cells["of"].append(name)

    def listed(key: str) -> Callable[[Mapping], str]:
        return lambda row: ", ".join(f"`{one}`" for one in dict.fromkeys(row[key]))

    columns: Columns = {"option": listed("options"), other_names.PROGRAMS[program]: lambda row: f"`{row['value']}`"}
    every = len(TRAINERS[program])
    columns |= {"here": listed("here"), "for": lambda row: "all" if len(row["of"]) == every else ", ".join(row["of"])}
    return columns, [row for row in found.values() if {_number(one) for one in row["here"]} != {_number(row["value"])}]


def _number(text: str) -> float | str:
    """Returns a value so that 1e-6 equals 1e-06."""
    try:
        return float(text)
    except ValueError:
        return text


def _tables(tree: OptionTree, verb: str = "", besides: Sequence[str] = ()) -> list[str]:
    """Returns a table of the plain options, then one for each group.

    verb: added to their titles.
    besides: what is left out.
    """
    rows: dict[str, dict[str, list[str]]] = {"": {}}
    for key, one in options_of(tree).items():
        group = key.partition(".")[0]
        if group not in besides:  # an option for each of some names has one row
            rows.setdefault(group if len(one.path) > 1 + bool(one.form) else "", {})[one.form or key] = _row(key, one)
    tables = {group: _lines(HEADING, list(of_group.values())) for group, of_group in rows.items()}
    return ["\n", tables.pop(""), *(part for group in tables for part in (f"\n### {group}{verb}\n\n", tables[group]))]


def _tables_of_algorithm(algorithm: Algorithm) -> list[str]:
    """Returns the models of an algorithm, and its options."""
    config = configs.Config(preset="", algorithm=algorithm)
    rates = config.optimizer.lr
    rows = []
    for name, role in algorithm.roles.items():
        rate = f"`optimizer.{name}{configs.LR}={rates[name]}`" if name in rates else "-"
        empty = ", else ".join(f"the {other}'s folder" for other in role.starts_from)
        if name == next(iter(algorithm.roles)):
            empty = "that of `--model` or the preset"
        elif role.judge:
            empty = "none: a reward function scores"
        rows.append([f"`models.{name}`", role.head, rate, empty[:1].upper() + empty[1:]])
    options = [_row(key, one) for key, one in options_of(config).items() if one.path[0] == "options"]
    head = ("model", "head", "learning rate", "where the folder is empty")
    return [_lines(head, rows), "\n", _lines(HEADING, options)]


def strategy_options(name: str) -> list[tuple[str, Any, Any, str]]:
    """Returns name, type, default and meaning of each option of a strategy."""
    strategy = load_strategy(name)
    return [
        (one.name, one.annotation, one.default, strategy.meanings[one.name]) for one in strategy.parameters.values()
    ]


def _table_of_presets() -> str:
    """Returns the options that presets set."""
    values = {name: _values(presets.load(name, algorithm="ppo")) for name in SHOWN_PRESETS}
    defaults = _values(configs.Config(preset=""))
    keys = [key for key in defaults if any(values[name][key] != defaults[key] for name in values) and key != "preset"]
    rows = []
    for key in keys:
        cells = (values[name][key] if values[name][key] != defaults[key] else None for name in values)
        rows.append([f"`{key}`", *("" if value is None else value_text(value) for value in cells)])
    return "\n" + _lines(("option", *(f"`{name}`" for name in SHOWN_PRESETS)), rows)


def _values(config: configs.Config) -> dict[str, Any]:
    """Returns the value of each option by its dotted key."""
    return {key: one.value for key, one in options_of(config).items()}


def _row(key: str, one: Option) -> list[str]:
    default = "" if one.form else one.value
    return _cells(one.form or key, one.annotation, default, one.meaning)


def _cells(name: str, annotation: Any, default: Any, meaning: str) -> list[str]:
    meaning = (meaning if meaning.endswith("...") else meaning.removesuffix(".")).replace("None: ", "`none`: ")
    return [f"`{name}`", type_text(annotation), value_text(default), meaning[:1].upper() + meaning[1:]]


def value_text(value: Any) -> str:
    """Returns a value as it is written on the command line."""
    if str(REPOSITORY) in (text := text_of(value)):
        return "embedded"  # a file of the package
    return f"`{text}`" if text else "-"


def type_text(annotation: Any) -> str:
    """Returns a type in words: `whole number, at least 1`."""
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
    """Returns values with commas: any number of one type (`texts`), or a fixed number (`2 numbers, each above 0`)."""
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
