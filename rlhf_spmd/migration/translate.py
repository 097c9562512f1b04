"""From a configuration of another program to a file of options of this one."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from rlhf_spmd.config.file import to_text
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.json_text import json_value
from rlhf_spmd.files.printing import on_one_line
from rlhf_spmd.migration.rules import (
    ALGORITHMS,
    RULES,
    Differs,
    Here,
    Later,
    Options,
    copied,
    from_values,
    has_option,
    layout_of,
)
from rlhf_spmd.migration.sources import Source, Value, text_of
from rlhf_spmd.pages.algorithm import Algorithm, load_algorithm
from rlhf_spmd.pages.other_names import PROGRAMS, Kind, defaults, find
from rlhf_spmd.plan.workload import SHAPES

MODULES = {"train_dpo": "dpo", "train_sft": "sft", "train_rm": "reward_model", "train_kd": "distill"}  # of OpenRLHF
BILLIONS = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)\s*[bB](?![a-zA-Z])")
NAMED = ("algorithm", "preset", "model", "strategy", "layout")  # first in the file
OFF = ("", "false", "0", "0.0", "1", "1.0", "-1", "none", "None")  # values of what is not used
HEADINGS: dict[Kind | None, str] = {
    "option": "Read:",
    "no_effect": "Without effect here:",
    "unavailable": "Not available here:",
    None: "Unknown, and left out:",
}


@dataclass(frozen=True, slots=True)
class Line:
    """An option of the other program.

    kind: None if it is unknown.
    why: the reason, written beside it.
    """

    key: str
    value: Value
    kind: Kind | None
    options: Options = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True, slots=True)
class Translation:
    """A configuration as options of this program, with the other program's defaults.

    later: options that the user must complete, with value and reason.
    chosen: options that the configuration does not have, with the reason.
    """

    source: Source
    algorithm: str
    options: Mapping[str, Value]
    later: Mapping[str, tuple[Value, str]]
    chosen: Mapping[str, str]
    lines: tuple[Line, ...]

    def text(self, path: str) -> str:
        """Translates a configuration to a file of options, with what became of every option of `path` as comments."""
        program = PROGRAMS[self.source.program]
        parts: dict[str, list[str]] = {
            "": [
                f"From {path} ({program}), by `rlhf_spmd coming-from`.",
                f"Where it leaves out what changes learning, {program}'s default is written.",
            ],
            "To be completed:": [f"{key}: {text_of(value)}  ({why})" for key, (value, why) in self.later.items()],
            "Chosen here:": [f"{key}: {why}" for key, why in self.chosen.items()],
        }
        for kind, heading in HEADINGS.items():
            named = [line for line in self.lines if (line.kind if line.kind != "part" else "option") == kind]
            parts[heading] = [_shown(line) for line in named]
        parts["Not read:"] = [f"{key}: {why}" for key, why in self.source.left.items()]
        # one line each: what a foreign file says must not become an option
        comments = [
            "\n".join(f"# {on_one_line(line)}" for line in filter(None, [heading, *lines]))
            for heading, lines in parts.items()
            if lines
        ]
        return "\n\n".join([comments[0], to_text(self._tree()), *comments[1:]])

    def _tree(self) -> dict[str, Value]:
        """Returns options in their groups."""
        tree: dict[str, Value] = {}
        options = {key: self.options[key] for key in NAMED if key in self.options} | {**self.options}
        with_strategy = any(key.startswith("strategy.") for key in options)
        for key, value in options.items():
            group, _, leaf = ("strategy.name" if key == "strategy" and with_strategy else key).rpartition(".")
            place = tree.setdefault(group, {}) if group else tree
            place[leaf] = _plain(value)
        return tree


def _plain(value: Value) -> Value:
    """Returns a number as a number, so that it needs no quotes; a mapping as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json_value(value)
    except ValueError:
        return value


def _shown(line: Line) -> str:
    text = " ".join(text_of(line.value).split())
    text = text if len(text) <= 60 else text[:57] + "..."
    ours = ", ".join(f"{key}: {text_of(value)}" for key, value in line.options.items())
    return f"{line.key}: {text}" + (f" -> {ours}" if ours else "") + (f" ({line.why})" if line.why else "")


def translate(source: Source, algorithm: str | None = None) -> Translation:
    """Translates a configuration. algorithm: its name here; None: as the source says, or as its options suggest.
    Raises UserError for an algorithm that this program does not have."""
    page = load_algorithm(algorithm or algorithm_of(source))
    options: dict[str, Value] = {"algorithm": page.name}
    later: dict[str, tuple[Value, str]] = {}
    rows, why = defaults(source.program, page.name), f"the default of {PROGRAMS[source.program]}"
    whole = replace(source, values={row["there"]: row["value"] for row in rows if "there" in row} | {**source.values})
    lines = [
        line if line.key in source.values else replace(line, why=line.why or why)
        for line in (_line(whole, page, key, value, later) for key, value in whole.values.items())
        if line.key in source.values or line.kind in ("option", "unavailable")
    ]
    for line in lines:
        if line.kind == "option":
            options |= {key: value for key, value in line.options.items() if key != "algorithm" and key not in later}
    chosen: dict[str, str] = {}
    for row in rows:
        if all(text_of(options.get(key)) == value for key, value in row.get("where", {}).items()):
            left_out = {
                key: row["value"]
                for key in row.get("ours", "").split()
                if has_option(page, key) and key not in options and key not in later
            }
            options, chosen = options | left_out, chosen | dict.fromkeys(left_out, why)
    chosen |= _complete(source, options, later)
    return Translation(source, page.name, options, later, chosen, tuple(lines))


def _line(source: Source, page: Algorithm, key: str, value: Value, later: dict[str, tuple[Value, str]]) -> Line:
    """Translates one option to a line; what the user must complete goes to `later`."""
    name = find(source.program, key)
    if name is None:
        return Line(key, value, None)
    if name.kind in ("no_effect", "unavailable", "part"):
        is_off = name.kind == "unavailable" and text_of(value) in OFF
        kind: Kind = "no_effect" if is_off else name.kind
        why = "it is off" if is_off else name.why
        return Line(key, value, kind, why=why.replace("*", page.name))
    rule = from_values if name.values else RULES.get(name.rule, copied)
    here = Here(source, page, name, key)
    try:
        if not here.ours and rule not in (from_values, RULES["overlong"], RULES["overlong_penalty"], RULES["discount"]):
            raise Differs("unavailable", f"{page.name} has no such option")
        found = rule(here, value)
    except Differs as differs:
        return Line(key, value, differs.kind, why=differs.why)
    if isinstance(found, Later):
        later |= {one: (given, found.why) for one, given in found.options.items()}
        return Line(key, value, "option", found.options, "to be completed")
    return Line(key, value, "option", {_word(one): given for one, given in found.items()})


def _word(key: str) -> str:
    """Returns a word of the command line as a key of a file."""
    return key.removeprefix("--")


def algorithm_of(source: Source) -> str:
    """Returns the algorithm of a configuration. Raises UserError if this program does not have it."""
    if source.module in MODULES:
        return MODULES[source.module]
    if source.program != "trl":
        key = "algorithm.adv_estimator" if source.program == "verl" else "advantage_estimator"
        named = source.text(key, "gae")
        if named not in ALGORITHMS:
            raise UserError(f"{key}={named}: no algorithm here computes such advantages; name one with --algorithm")
        return ALGORITHMS[named][0]
    keys = source.values.keys()
    if keys & {"num_generations", "max_completion_length", "reward_funcs"}:
        return "rloo" if source.text("loss_type") == "" and "rloo" in source.text("output_dir").lower() else "grpo"
    if "center_rewards_coefficient" in keys:
        return "reward_model"
    if "total_episodes" in keys or "reward_model_path" in keys:
        return "ppo"
    return "dpo" if keys & {"beta", "label_smoothing", "ref_model_name_or_path"} else "sft"


def _complete(source: Source, options: dict[str, Value], later: dict[str, tuple[Value, str]]) -> dict[str, str]:
    """Adds what options need beside each other, so that `check` takes the file -> what was chosen, with the reasons."""
    chosen = {}
    if "model" not in options:
        options["preset"] = shape_near(text_of(later.get("model", ("", ""))[0]))
        chosen["preset"] = "sizes for `check` and `plan`; replace it by the model"
    if "layout" not in options:
        options["layout"] = "{}x{}".format(*layout_of(source))
        chosen["layout"] = "nodes x devices of a node, for `check` and `plan`"
    if "strategy.zero" not in options:
        options["strategy.zero"] = "2" if source.program == "openrlhf" else "3"
        chosen["strategy.zero"] = "the default of OpenRLHF" if source.program == "openrlhf" else "weights are divided"
    if options["strategy.zero"] != "1" and {"lora.rank", "lora.critic.rank"} & options.keys():
        options["strategy.zero"] = "1"
        chosen["strategy.zero"] = "adapters train on a base that is whole, or split by tp or pp"
    options["strategy"] = options.pop("strategy", "flattening")
    chosen["strategy"] = "`plan --config FILE` searches a faster placement"
    needs = {"data.epochs": "data.prompts", "reward_weights": "reward_function"}
    needs |= {key: "eval.prompts" for key in options if key.startswith("eval.")}
    needs |= dict.fromkeys(("logging.entity", "logging.group"), "wandb")
    for key, needed in needs.items():
        if key in options and needed not in options:
            later[key] = (options.pop(key), f"with {needed}")
    return chosen


def shape_near(name: str) -> str:
    """Returns the preset whose size is nearest to the one in a model's name, of its family if two are; for forecasts
    until the model is there."""
    billions = [float(one) for one in BILLIONS.findall(name)]
    size = billions[-1] if billions else 7.0

    def distance(preset: str) -> tuple[float, bool]:
        family = re.split(r"[\d-]", preset)[0]
        return abs(float(BILLIONS.findall(preset)[-1]) - size), family not in name.lower()

    return min(SHAPES, key=distance)


def counts(lines: Iterable[Line]) -> dict[str, int]:
    """Returns how many options there are of each kind."""
    kinds = [line.kind or "unknown" for line in lines]
    return {kind: kinds.count(kind) for kind in ("option", "part", "no_effect", "unavailable", "unknown")}
