"""Some runs as one page of HTML that needs nothing else: no script, no network, no picture beside it.

The curves of all runs are in the same pictures; tables say what differs between their options, and with what they were
made. Each run has a section with its samples before and after training. All text of a run is escaped: what HTML
would read as tags where it is put in, control characters in the whole page.
"""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup

from rlhf_spmd.config.evaluation_metrics import STANDARD_ERROR, titled
from rlhf_spmd.config.options import resolved
from rlhf_spmd.config.presets import PRESETS, load
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.json_text import json_text
from rlhf_spmd.files.printing import formatted, printable
from rlhf_spmd.files.reading import is_file, paths_in, why_no_file
from rlhf_spmd.pages.algorithm import algorithm_names
from rlhf_spmd.runtime.failure.postmortem import check_is_folder
from rlhf_spmd.runtime.pictures.curves import Series, curves, finite_points
from rlhf_spmd.runtime.pictures.palette import run_colours, styles_of_names
from rlhf_spmd.runtime.pictures.picture import Picture, svg_of
from rlhf_spmd.runtime.pictures.timeline import Panel, add_stack
from rlhf_spmd.runtime.records.run_files import Reported, Row, read_config, read_rows, reported
from rlhf_spmd.runtime.records.run_folder import CONFIG, EVALUATIONS
from rlhf_spmd.runtime.world.trace import read_chrome

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #22262e; max-width: 1000px; margin: 2em auto; padding: 0 1em }
h1, h2 { line-height: 1.2 } h2 { margin: 2.5em 0 .3em; border-top: 1px solid #d3d7de; padding-top: .6em }
table { border-collapse: collapse; font-size: 14px; margin: .6em 0 }
th, td { padding: 3px 12px 3px 0; text-align: left; vertical-align: top; border-bottom: 1px solid #e7e9ed }
th, td { white-space: nowrap } .scroll { overflow-x: auto }
td.text { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 14em }
td.turns { font: 12px/1.4 ui-monospace, monospace }
svg { margin: 6px 10px 6px 0; max-width: 100%; height: auto }
.run { display: inline-block; width: 12px; height: 12px; border-radius: 3px }
.faint { color: #69707c } summary { cursor: pointer; color: #69707c }
"""
PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{{ title }}</title><style>{{ style | safe }}</style></head>
<body>
<h1>{{ title }}</h1>
<div class="scroll"><table>
<tr><th>run</th><th>algorithm</th><th>iterations</th><th>first → last value (of evaluations, if any)</th>
<th>time of iterations and evaluations, s</th></tr>
{% for run in runs %}
<tr><td><span class="run" style="background: {{ colours[loop.index0] }}"></span>
<a href="#run-{{ loop.index0 }}">{{ run.name }}</a></td><td>{{ run.about.title }}</td>
<td>{{ run.metrics | length }}{% if run.config.iterations %} of {{ run.config.iterations }}{% endif %}</td>
<td>{% for name, (first, last) in run.ends.items() %}
{{ name }} {{ number(first) }} → {{ number(last) }}{% if not loop.last %}<br>{% endif %}
{% else %}no iteration yet{% endfor %}</td><td>{{ "{:,.0f}".format(run.seconds) }}</td></tr>
{% endfor %}
</table></div>
{% set shown, others = pictures %}
{% if shown %}
<p class="faint">{{ legend }}</p>
{{ shown }}
{% endif %}
{% if others %}
<details><summary>other metrics</summary>{{ others }}</details>
{% endif %}
{% for heading, rows in tables %}
<h2>{{ heading }}</h2>
{% if not rows %}<p class="faint">None.</p>{% endif %}
<div class="scroll"><table>
<tr><th></th>{% for run in runs %}<th>{{ run.name }}</th>{% endfor %}</tr>
{% for name, values in rows %}
<tr><td>{{ name }}</td>{% for value in values %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% endfor %}
{% if lanes %}
<h2>The last iteration of each run</h2>
{{ lanes }}
{% endif %}
{% for run in runs %}
<section>
<h2 id="run-{{ loop.index0 }}">{{ run.name }}: {{ run.about.title }}
{%- if run.about.strategy %} by {{ run.about.strategy }}{% endif %}</h2>
<div class="scroll"><table>
{% for role, folder in run.models.items() %}
{% set maker = made_by.get(folder) %}
<tr><td>reads {{ role }}</td><td>{{ folder }}
{%- if maker is not none %}, by <a href="#run-{{ maker }}">{{ runs[maker].name }}</a>{% endif %}</td></tr>
{% endfor %}
{% for label, options in (("reads rows", run.config.data), ("held-out rows", run.config.eval))
if options is mapping and options.prompts %}
<tr><td>{{ label }}</td><td>{{ options.prompts }}</td></tr>
{% endfor %}
{% for folder in run.written %}
<tr><td>writes</td><td>{{ folder }}</td></tr>
{% endfor %}
</table></div>
{% if run.samples %}
<div class="scroll"><table>
<tr><th>prompt</th><th></th><th>score</th><th>response</th></tr>
{% for sample in run.samples %}
{% for when in ("before", "after") if sample.get(when) is not none %}
<tr><td class="text">{% if when == "before" %}{{ sample.prompt }}{% endif %}</td><td>{{ when }}</td>
<td>{{ score(sample["reward_" ~ when]) }}</td>
<td class="text{% if sample.by_turns %} turns{% endif %}">{{ sample[when] }}</td></tr>
{% endfor %}
{% endfor %}
</table></div>
{% endif %}
</section>
{% endfor %}
</body>
</html>
"""
LEGEND = (
    "Lines: training, by iteration. Dots: evaluations on held-out data, by the number of iterations before them, with "
    "95% intervals over prompts."
)
NONE = "–"  # what a run does not have
IN_WORDS = {"": "empty", "[]": "empty", "{}": "empty", "null": "none"}  # values of options
PART_OF_A_SECOND = re.compile(r"(?<=:\d\d)\.\d+")
# curves that are always shown, after those that the algorithm reports
FIRST = ("response_length", "turns", "tool_calls", "tool_failures")
MOST_LANES = 32  # of all timelines together; with more ranks, those that do the same share a lane


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What a run folder holds."""

    path: Path
    config: Row
    about: Reported
    metrics: list[Row]
    evaluations: list[Row]
    samples: list[Row]
    records: list[Row]  # of its trace

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def models(self) -> Mapping[str, str]:
        """Role -> the folder that it was read from."""
        models = self.config.get("models")
        return {role: str(folder) for role, folder in models.items() if folder} if isinstance(models, dict) else {}

    @property
    def written(self) -> list[Path]:
        """The folders of the models that it has trained."""
        return [path for path in paths_in(self.path, "*") if is_file(path / "config.json")]

    @property
    def headlines(self) -> list[str]:
        """What its algorithm reports, then the metrics of an evaluation that scores responses."""
        scores = [name for row in self.evaluations for name in row if "@" in name]
        return list(dict.fromkeys((*self.about.headlines, *scores)))

    @property
    def ends(self) -> dict[str, tuple[float, float]]:
        """The first and the last value of its headlines, on held-out data where it has an evaluation."""
        ends = {}
        for name in self.headlines:
            rows = self.evaluations if any(name in row for row in self.evaluations) else self.metrics
            if values := _numbers(rows, name):
                ends[name] = values[0], values[-1]
        return ends

    @property
    def seconds(self) -> float:
        """Of iterations and evaluations."""
        return sum(_numbers(self.metrics, "iteration_s")) + sum(_numbers(self.evaluations, "evaluation_s"))


def read(path: Path) -> RunFiles:
    """Raises UserError if it is not a run folder, and OSError if it can't be read."""
    check_is_folder(path)
    config = read_config(path)
    if not config:
        why = why_no_file(path / CONFIG) or "is cut or not JSON"
        raise UserError(f"{path} is not a run folder: {CONFIG} {why}; give the folder that train printed")
    metrics, evaluations, samples = (read_rows(path / name) for name in ("metrics.jsonl", EVALUATIONS, "samples.jsonl"))
    records = read_chrome(path / "timeline.json")
    return RunFiles(path, config, reported(path, config), metrics, [*map(titled, evaluations)], samples, records)


def page(runs: Sequence[RunFiles], title: str) -> str:
    """Returns the whole page."""
    written = {str(folder.resolve()): number for number, run in enumerate(runs) for folder in run.written}
    made_by: dict[str, int | None] = {}
    for folder in (folder for run in runs for folder in run.models.values()):
        with suppress(ValueError):  # of a text that is no path
            made_by[folder] = written.get(os.path.realpath(folder))
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(PAGE)
    colours = run_colours(len(runs))
    made_with = [{"strategy": run.about.strategy or NONE, **run.about.made_with} for run in runs]
    made_with = [{name: PART_OF_A_SECOND.sub("", text) for name, text in made.items()} for made in made_with]
    tables = [("Strategy, code and machines", _table(made_with))]
    if len(runs) > 1:
        tables.insert(0, ("Options that differ", _differing(runs)))
    parts = {"colours": colours, "pictures": _pictures(runs, colours), "tables": tables, "lanes": _timelines(runs)}
    text = template.render(
        title=title, runs=runs, made_by=made_by, legend=LEGEND, style=STYLE, number=formatted, score=_score, **parts
    )
    return printable(text)


def _differing(runs: Sequence[RunFiles]) -> list[tuple[str, list[str]]]:
    """Returns the options that differ, without those that have their default in each of the runs that has them."""
    configs, defaults = [_flat(run.config) for run in runs], [_defaults(run.config) for run in runs]
    own = [config.items() - default.items() for config, default in zip(configs, defaults, strict=True)]
    somebody_set = {name for options in own for name, _ in options}
    return [(name, values) for name, values in _table(configs) if name in somebody_set and len(set(values)) > 1]


def _defaults(config: Row) -> dict[str, str]:
    """Returns the options of a run's preset and algorithm; none for an algorithm of the user's, whose code is not
    run."""
    preset, algorithm = config.get("preset"), config.get("algorithm")
    if preset not in PRESETS or algorithm not in algorithm_names():
        return {}
    return _flat(resolved(load(preset, algorithm=algorithm)))


def _numbers(rows: Sequence[Row], name: str) -> list[float]:
    """Returns the finite values of a metric."""
    return [value for _, value in finite_points([(0, row.get(name)) for row in rows])]


def _score(value: object) -> str:
    return f"{value:+.3f}" if isinstance(value, int | float) else ""


def _pictures(runs: Sequence[RunFiles], colours: Sequence[str]) -> tuple[Markup, Markup]:
    """Returns the curves of what the runs report, of evaluations and lengths; and those of all other metrics."""
    metrics: dict[str, dict[str, list[Series]]] = {}  # metric -> algorithm of a loss, else "" -> curves
    for run, colour in zip(runs, colours, strict=True):
        for name in dict.fromkeys(name for row in [*run.evaluations, *run.metrics] for name in row):
            series = _series(run, colour, name)
            if name != "iteration" and not name.endswith(STANDARD_ERROR) and (series.line or series.dots):
                # losses of two algorithms are different numbers
                algorithm = run.about.title if "loss" in name else ""
                metrics.setdefault(name, {}).setdefault(algorithm, []).append(series)
    first = dict.fromkeys([*(name for run in runs for name in run.headlines), *FIRST])
    shown = [_curves(name, metrics.pop(name)) for name in first if name in metrics]
    others = [_curves(name, groups) for name, groups in metrics.items()]
    return Markup("".join(shown)), Markup("".join(others))


def _curves(name: str, groups: Mapping[str, Sequence[Series]]) -> str:
    """Returns a picture of a metric for each group of runs, which several groups have in their titles."""
    return "".join(
        curves(f"{name} of {algorithm}" if len(groups) > 1 else name, series) for algorithm, series in groups.items()
    )


def _series(run: RunFiles, colour: str, name: str) -> Series:
    """Returns the curve of a metric; evaluations have the number of iterations before them, rows count from 0."""
    line = [(x + 1, y) for x, y in finite_points([(row.get("iteration"), row.get(name)) for row in run.metrics])]
    dots = finite_points([(row.get("iteration"), row.get(name)) for row in run.evaluations])
    before, mean, _ = name.rpartition("mean@")
    errors = _numbers(run.evaluations, f"{before}{STANDARD_ERROR}") if mean and "/" not in name[len(before) :] else []
    return Series(run.name, colour, line, dots, errors if len(errors) == len(dots) else ())


def _timelines(runs: Sequence[RunFiles]) -> Markup:
    """Returns a picture of the last iteration of each run that has a trace."""
    panels = [Panel(run.name, run.records) for run in runs if any(record["spans"] for record in run.records)]
    if not panels:
        return Markup("")
    spans = [span for run in runs for record in run.records for span in record["spans"]]
    calls = [name for name, category, *_ in sorted(spans, key=lambda span: span[2]) if category == "compute"]
    picture = Picture()
    add_stack(picture, panels, styles=styles_of_names(calls), most_lanes=MOST_LANES)
    return Markup(svg_of(picture.draw(), "timelines: " + ", ".join(panel.title for panel in panels)))


def _table(columns: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """Returns a row for each name: the values of the columns."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [column.get(name, NONE) for column in columns]) for name in names]


def _flat(options: Mapping[str, object], before: str = "") -> dict[str, str]:
    """Returns options of groups by their whole names, and their values as JSON or words, texts without quotes."""
    values: dict[str, str] = {}
    for name, value in sorted(options.items()):
        if isinstance(value, Mapping) and value:
            values |= _flat(value, f"{before}{name}.")
        else:
            text = value if isinstance(value, str) else json_text(value)
            values[f"{before}{name}"] = IN_WORDS.get(text, text)
    return values
