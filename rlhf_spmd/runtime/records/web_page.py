"""Some runs as one page of HTML that needs nothing else: no script, no network, no picture beside it.

The curves of all runs are in the same pictures; tables say what differs between their options, and with what they were
made. Each run has a heading and its samples before and after training. All text of a run is escaped: what HTML
would read as tags where it is put in, control characters in the whole page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.json_text import json_text
from rlhf_spmd.files.printing import formatted, printable
from rlhf_spmd.files.reading import is_file, paths_in, why_no_file
from rlhf_spmd.runtime.failure.postmortem import check_is_folder
from rlhf_spmd.runtime.pictures.curves_svg import Series, curves, finite_points
from rlhf_spmd.runtime.pictures.palette import run_colours
from rlhf_spmd.runtime.pictures.timeline_svg import last_iteration, timelines
from rlhf_spmd.runtime.records.evaluation_text import titled
from rlhf_spmd.runtime.records.run_files import Reported, Row, read_config, read_rows, reported
from rlhf_spmd.runtime.records.run_folder import CONFIG, EVALUATIONS
from rlhf_spmd.runtime.world.trace import read_chrome

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #22262e; max-width: 1000px; margin: 2em auto; padding: 0 1em }
h1, h2 { line-height: 1.2 } h2 { margin: 2.5em 0 .3em; border-top: 1px solid #d3d7de; padding-top: .6em }
table { border-collapse: collapse; font-size: 14px; margin: .6em 0 }
th, td { padding: 3px 12px 3px 0; text-align: left; vertical-align: top; border-bottom: 1px solid #e7e9ed }
td.text { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 12em }
td.turns { font: 12px/1.4 ui-monospace, monospace }
svg { margin: 6px 10px 6px 0; max-width: 100%; height: auto }
td.value { overflow-wrap: anywhere }
.run { display: inline-block; width: 12px; height: 12px; border-radius: 3px }
.faint { color: #69707c } summary { cursor: pointer; color: #69707c }
"""
PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{{ title }}</title><style>{{ style | safe }}</style></head>
<body>
<h1>{{ title }}</h1>
<table>
<tr><th>run</th><th>algorithm</th><th>iterations</th><th>first → last value, of evaluations if there are any</th>
<th>seconds of iterations and evaluations</th></tr>
{% for run in runs %}
<tr><td><span class="run" style="background: {{ colours[loop.index0] }}"></span>
<a href="#run-{{ loop.index0 }}">{{ run.name }}</a></td><td>{{ run.about.title }}</td>
<td>{{ run.metrics | length }}{% if run.config.iterations %} of {{ run.config.iterations }}{% endif %}</td>
<td>{% for name, (first, last) in ends(run).items() %}
{{ name }} {{ number(first) }} → {{ number(last) }}{% if not loop.last %}<br>{% endif %}
{% else %}no iteration yet{% endfor %}</td><td>{{ "{:,.0f}".format(seconds(run)) }}</td></tr>
{% endfor %}
</table>
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
<table>
<tr><th></th>{% for run in runs %}<th>{{ run.name }}</th>{% endfor %}</tr>
{% for name, values in rows %}
<tr><td>{{ name }}</td>{% for value in values %}<td class="value">{{ value }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% endfor %}
{% if lanes %}
<h2>The last iteration of each run</h2>
{{ lanes }}
{% endif %}
{% for run in runs %}
<section>
<h2 id="run-{{ loop.index0 }}">{{ run.name }}: {{ run.about.title }}
{%- if run.about.strategy %} by {{ run.about.strategy }}{% endif %}</h2>
<table>
{% for role, folder in run.models.items() %}
{% set maker = made_by.get(place(folder)) %}
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
</table>
{% if run.samples %}
<table>
<tr><th>prompt</th><th></th><th>score</th><th>response</th></tr>
{% for sample in run.samples %}
{% for when in ("before", "after") if sample.get(when) is not none %}
{% set score = points([(0, sample["reward_" ~ when])]) %}
<tr><td class="text">{% if when == "before" %}{{ sample.prompt }}{% endif %}</td><td>{{ when }}</td>
<td>{% if score %}{{ number(score[0][1], "{:+.3f}") }}{% endif %}</td>
<td class="text{% if sample.by_turns %} turns{% endif %}">{{ sample[when] }}</td></tr>
{% endfor %}
{% endfor %}
</table>
{% endif %}
</section>
{% endfor %}
</body>
</html>
"""
LEGEND = "Lines: training, by iteration. Dots: evaluations on held-out data, by the number of iterations before them."
NONE = "–"  # what a run does not have
FIRST = (
    "response_length",
    "turns",
    "tool_calls",
    "tool_failures",
)  # curves that are always shown, after those that the algorithm reports


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
        found = self.config.get("models")
        return {role: str(folder) for role, folder in found.items() if folder} if isinstance(found, dict) else {}

    @property
    def written(self) -> list[Path]:
        """The folders of the models that it has trained."""
        return [path for path in paths_in(self.path, "*") if is_file(path / "config.json")]


def read(path: Path) -> RunFiles:
    """Raises UserError if it is not a run folder, and OSError if it can't be read."""
    check_is_folder(path)
    if why := why_no_file(path / CONFIG):
        if "does not exist" not in why:
            raise UserError(f"{path / CONFIG} {why}")
        raise UserError(f"{path} has no {CONFIG}, so it is not a run folder; give the folder that train printed")
    config = read_config(path)
    if not config:
        raise UserError(f"{path / CONFIG} can't be read, so it is not known what {path} is a run of; leave it out")
    metrics, evaluations, samples = (read_rows(path / name) for name in ("metrics.jsonl", EVALUATIONS, "samples.jsonl"))
    records = read_chrome(path / "timeline.json")
    return RunFiles(path, config, reported(path, config), metrics, [*map(titled, evaluations)], samples, records)


def page(runs: Sequence[RunFiles], title: str) -> str:
    """Returns the whole page."""
    made_by = {folder.resolve(): number for number, run in enumerate(runs) for folder in run.written}
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(PAGE)
    colours = run_colours(len(runs))
    shown = [found for run in runs if (found := last_iteration(run.name, run.records))]
    tables = [("Options that differ", _differences(runs))] if len(runs) > 1 else []
    tables.append(("Strategy, code and machines", _made_with(runs)))
    parts = {"colours": colours, "pictures": _pictures(runs, colours), "tables": tables}
    parts |= {"lanes": Markup(timelines(shown)) if shown else "", "legend": LEGEND, "style": STYLE}
    functions = {"place": _place, "ends": ends, "seconds": _seconds, "number": formatted, "points": finite_points}
    return printable(template.render(title=title, runs=runs, made_by=made_by, **parts, **functions))


def ends(run: RunFiles) -> dict[str, tuple[float, float]]:
    """Returns the first and the last value of what an algorithm reports, on held-out data where it has an
    evaluation."""
    found = {}
    for name in (*run.about.headlines, *_scores(run)):
        rows = run.evaluations if any(name in row for row in run.evaluations) else run.metrics
        if values := [y for _, y in finite_points([(index, row.get(name)) for index, row in enumerate(rows)])]:
            found[name] = values[0], values[-1]
    return found


def _seconds(run: RunFiles) -> float:
    """Returns the seconds of iterations and evaluations."""
    times = [row.get("iteration_s") for row in run.metrics] + [row.get("evaluation_s") for row in run.evaluations]
    return sum(y for _, y in finite_points([(0, one) for one in times]))


def _place(folder: str) -> Path | None:
    """Returns a folder without links; None if the text is not a path."""
    try:
        return Path(folder).resolve()
    except (OSError, ValueError, RuntimeError):
        return None


def _scores(run: RunFiles) -> list[str]:
    """Returns the metrics of an evaluation that scores responses."""
    return [name for name in dict.fromkeys(name for row in run.evaluations for name in row) if "@" in name]


def _pictures(runs: Sequence[RunFiles], colours: Sequence[str]) -> tuple[Markup, Markup]:
    """Returns the curves of what the runs report, of evaluations and lengths; and those of all other metrics."""
    found: dict[str, list[Series]] = {}
    for run, colour in zip(runs, colours, strict=True):
        for name in dict.fromkeys(name for row in [*run.evaluations, *run.metrics] for name in row):
            line = finite_points([(_after(row.get("iteration")), row.get(name)) for row in run.metrics])
            dots = finite_points([(row.get("iteration"), row.get(name)) for row in run.evaluations])
            if name != "iteration" and (line or dots):
                found.setdefault(name, []).append(Series(run.name, colour, line, dots))
    first = [name for run in runs for name in (*run.about.headlines, *_scores(run))]
    shown = [name for name in dict.fromkeys((*first, *FIRST)) if name in found]
    others = [name for name in found if name not in shown]
    return _joined(found, shown), _joined(found, others)


def _joined(found: Mapping[str, Sequence[Series]], names: Sequence[str]) -> Markup:
    """Returns the pictures of these metrics, one after another."""
    return Markup("".join(curves(name, found[name]) for name in names))


def _after(iteration: object) -> object:
    """Returns the number of iterations after the one with this number, as on the console; evaluations have such
    numbers."""
    return iteration + 1 if isinstance(iteration, int | float) else None


def _differences(runs: Sequence[RunFiles]) -> list[tuple[str, list[str]]]:
    """Returns the options that differ between runs, with their values."""
    options = [_flat(run.config) for run in runs]
    names = sorted({name for one in options for name in one})
    rows = [(name, [one.get(name, NONE) for one in options]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _made_with(runs: Sequence[RunFiles]) -> list[tuple[str, list[str]]]:
    """Returns strategy, code and machines of the runs, as far as they are known."""
    facts = [{"strategy": run.about.strategy or NONE, **run.about.made_with} for run in runs]
    return [
        (name, [one.get(name, NONE) for one in facts]) for name in dict.fromkeys(name for one in facts for name in one)
    ]


def _flat(options: Mapping[str, object], before: str = "") -> dict[str, str]:
    """Returns options of groups by their whole names, and their values as JSON, texts without quotes."""
    found: dict[str, str] = {}
    for name, value in options.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = value if isinstance(value, str) and value else json_text(value)
    return found
