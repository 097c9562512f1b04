"""From a configuration of another program to a file of options of this one."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhf_spmd.config.file import to_text
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.json_text import json_value
from rlhf_spmd.files.printing import on_one_line
from rlhf_spmd.migration.rules import Differs, Job, Options, has_option, options_of
from rlhf_spmd.migration.sources import Source, Value, text_of, words_of
from rlhf_spmd.pages.algorithm import Algorithm, load_algorithm
from rlhf_spmd.pages.other_names import PROGRAMS, Kind, defaults, find, names, table
from rlhf_spmd.plan.workload import SHAPES

BILLIONS = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)\s*[bB](?![a-zA-Z])")
FIRST = ("algorithm", "preset", "model", "strategy", "layout")  # in the file
HEADINGS: dict[str, tuple[Kind | None, ...]] = {
    "Read:": ("option", "part"),
    "Without effect here:": ("no_effect",),
    "Not available here:": ("unavailable",),
    "Unknown, and left out:": (None,),
}
BESIDE = {  # options, or the beginnings of their names -> an option that they need
    "data.epochs": "data.prompts",
    "reward_weights": "reward_function",
    "eval.": "eval.prompts",
    "logging.": "wandb",
}
NEEDED = {  # what a run cannot do without -> options, of which one must be in the configuration
    "model": {"model"},
    "data": {"data.prompts"},
    "batch": {"rollout_batch", "mini_batch", "micro_batch"},
}


@dataclass(frozen=True, slots=True)
class Line:
    """An option of the other program.

    kind: None if it is unknown.
    why: the reason, written beside it.
    later: what the user must do before the options can be used.
    """

    key: str
    value: Value
    kind: Kind | None
    options: Options = field(default_factory=dict)
    why: str = ""
    later: str = ""

    @property
    def text(self) -> str:
        """What became of it."""
        text = " ".join(text_of(self.value).split())
        text = text if len(text) <= 60 else text[:57] + "..."
        ours = ", ".join(f"{key}: {text_of(value)}" for key, value in self.options.items())
        why = "to be completed" if self.later else self.why
        return f"{self.key}: {text}" + (f" -> {ours}" if ours else "") + (f" ({why})" if why else "")


@dataclass(frozen=True, slots=True)
class Translation:
    """A configuration as options of this program, with the other program's defaults.

    later: options that the user must complete, with value and reason.
    chosen: options that the configuration does not have, with the reason.
    """

    source: Source
    options: Options
    later: Mapping[str, str]
    chosen: Mapping[str, str]
    lines: tuple[Line, ...]

    def text(self, path: str) -> str:
        """Returns a file of options, with what became of every option of `path` as comments."""
        program = PROGRAMS[self.source.program]
        title = f"From {path} ({program}), by `rlhf_spmd coming-from`."
        parts = {
            title: [f"Where it leaves out what changes learning, {program}'s default is written."],
            "To be completed:": [f"{key}: {text}" for key, text in self.later.items()],
            "Chosen here:": [f"{key}: {text}" for key, text in self.chosen.items()],
        }
        for heading, kinds in HEADINGS.items():
            parts[heading] = [line.text for line in self.lines if line.kind in kinds]
        parts["Not read:"] = [f"{key}: {text}" for key, text in self.source.left.items()]
        # one line each: what a foreign file says must not become an option
        comments = [[f"# {on_one_line(line)}" for line in (heading, *part)] for heading, part in parts.items() if part]
        first, *others = ["\n".join(lines) for lines in comments]
        return "\n\n".join([first, to_text(self._tree()), *others])

    def _tree(self) -> dict[str, Value]:
        """Returns options in their groups."""
        tree: dict[str, Value] = {}
        for key in sorted(self.options, key=lambda key: key.partition(".")[0] not in FIRST):
            group, _, leaf = key.rpartition(".")
            place = tree.setdefault(group, {}) if group else tree
            place[leaf] = _plain(self.options[key])
        return tree

    @property
    def lacks(self) -> str:
        """What the configuration did not say, or how much of it is unknown; empty if it is a whole job."""
        given = [line for line in self.lines if line.key in self.source.values]
        options = {key for line in given for key in line.options if line.kind == "option"}
        unknown = [line.key for line in given if line.kind is None]
        if 3 * len(unknown) >= len(given):
            return f"{len(unknown)} of {len(given)} options are unknown"
        missing = [noun for noun, keys in NEEDED.items() if not keys & options]
        return f"no {' and no '.join(missing)} found" if missing else ""


def _plain(value: Value) -> Value:
    """Returns a number as a number, so that it needs no quotes."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    try:
        return json_value(value)
    except ValueError:
        return value


def translate(source: Source, algorithm: str | None = None) -> Translation:
    """Translates a configuration. algorithm: its name here; None: as the source says, or as its options suggest.
    Raises UserError for an algorithm that this program does not have."""
    page = load_algorithm(algorithm or algorithm_of(source))
    job, by_default = _job(source, page)
    values = {**by_default, **source.values}
    lines = [_line(job, key, value) for key, value in values.items()]
    options: Options = {"algorithm": page.name}
    later: dict[str, str] = {}
    for line in lines:
        if line.later:
            later |= {key: f"{text_of(value)}  ({line.later})" for key, value in line.options.items()}
        else:
            options = line.options | options if "algorithm" in line.options else options | line.options
    options = {key: value for key, value in options.items() if key not in later}
    chosen = _choose(job, options, later)
    lines = [line for line in lines if line.key in source.values or line.kind in ("option", "unavailable")]
    return Translation(source, options, later, chosen, tuple(lines))


def _job(source: Source, page: Algorithm) -> tuple[Job, Options]:
    """Returns the job, and of its values the other program's defaults, by their names there."""
    given: dict[str, Value] = {}
    by_default: dict[str, Value] = {}
    for key, value in source.values.items():
        for concept in _concepts(source.program, key, page.name):
            if text_of(value):
                given.setdefault(concept, value)
    for row in defaults(source.program, page.name):
        there = _concepts(source.program, row.get("there", ""), page.name)
        if there and not {*there} & given.keys():
            by_default[row["there"]] = row["value"]
            given |= dict.fromkeys(there, row["value"])
        if row.get("ours") == "optimizer.schedule":
            given.setdefault("optimizer.schedule", row["value"])
    return Job(source, page, given), by_default


def _concepts(program: str, key: str, algorithm: str) -> list[str]:
    """Returns what other entries call an option there."""
    return [name.concept for name in find(program, key) if name.concept and (not name.of or algorithm in name.of)]


def _line(job: Job, key: str, value: Value) -> Line:
    """Translates one option to a line."""
    names = find(job.source.program, key)
    if not names:
        return Line(key, value, None)
    kind: Kind = "option"
    try:
        options, later = options_of(job, key, value)
    except Differs as differs:
        if not differs.unread:
            return Line(key, value, differs.kind, why=differs.why.replace("*", job.page.name))
        keys = [ours.replace("*", job.page.name) for ours in names[0].ours]
        kind, later = differs.kind, differs.why
        options = {ours: value for ours in keys if has_option(job.page, ours)}
    why = "" if key in job.source.values else f"the default of {PROGRAMS[job.source.program]}"
    options = {ours.removeprefix("--"): text for ours, text in options.items()}
    return Line(key, value, kind, options, why, later)


def algorithm_of(source: Source) -> str:
    """Returns the algorithm of a configuration. Raises UserError if this program does not have it."""
    given = {name.concept: text_of(value) for key, value in source.values.items() for name in find(source.program, key)}
    if given.get("distillation") == "true":
        return "distill"
    if estimator := given.get("--algorithm"):
        values = next(name.values for name in names() if name.concept == "--algorithm")
        if estimator not in values:
            raise UserError(f"{estimator}: no algorithm here computes such advantages; name one with --algorithm")
        return values[estimator].split()[0].removeprefix("algorithm=")
    modules = table()["modules"]
    for word in [word for word in modules if word in words_of(source.module)]:
        if not modules[word]:
            raise UserError(f"{source.module}: {word} is not here; name an algorithm with --algorithm")
        return str(modules[word])
    signs = table()["signs"][source.program]
    return next(sign["algorithm"] for sign in signs if {*sign["keys"].split()} & {*source.values, "*"})


def _choose(job: Job, options: Options, later: dict[str, str]) -> dict[str, str]:
    """Adds the other program's defaults, and what options need beside each other -> what was added, with the reason."""
    program, chosen = job.source.program, {}
    if "model" not in options:
        if preset := shape_near(later.get("model", "")):
            options["preset"], chosen["preset"] = preset, "sizes for `check` and `plan`; replace it by the model"
        else:
            later["preset"] = "NAME  (the model's size is not known: give its folder, or sizes for `check`)"
    if "layout" not in {**options, **later}:
        options["layout"] = job.layout
        chosen["layout"] = "it is not given; batches for each device are for so many"
    for row in [*defaults(program, job.page.name), *table()["chosen"]]:
        for key in row.get("ours", "").split():
            is_missing = has_option(job.page, key) and key not in {**options, **later}
            if is_missing and Job(job.source, job.page, {**job.source.values, **options}).is_so(row.get("when", {})):
                options[key], chosen[key] = row["value"], row.get("why", f"the default of {PROGRAMS[program]}")
    for key in [*options]:
        for beginning, needed in BESIDE.items():
            if key.startswith(beginning) and needed not in options:
                later[key] = f"{text_of(options.pop(key))}  (with {needed})"
    return chosen


def shape_near(name: str) -> str:
    """Returns the preset whose size is nearest to the one in a model's name, of its family if two are; empty: the name
    has no size."""
    sizes = BILLIONS.findall(name)

    def distance(preset: str) -> tuple[float, bool]:
        family = re.split(r"[\d-]", preset)[0]
        return abs(float(BILLIONS.findall(preset)[-1]) - float(sizes[-1])), family not in name.lower()

    return min(filter(BILLIONS.search, SHAPES), key=distance) if sizes else ""
