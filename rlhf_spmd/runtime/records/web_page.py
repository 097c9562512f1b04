"""Some runs as one page of HTML that needs nothing else: no script, no network, no picture beside it.

Each run has a heading, its curves and its samples before and after training. All text of a run is escaped: what HTML
would read as tags where it is put in, control characters in the whole page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.printing import printable
from rlhf_spmd.files.reading import is_file, paths_in, why_no_file
from rlhf_spmd.runtime.diagnosis.postmortem import check_is_folder
from rlhf_spmd.runtime.pictures.curves_svg import curve, finite_points, short
from rlhf_spmd.runtime.records.run_files import Reported, Row, read_config, read_rows, reported
from rlhf_spmd.runtime.records.run_folder import CONFIG, EVALUATIONS

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #22262e; max-width: 1000px; margin: 2em auto; padding: 0 1em }
h1, h2 { line-height: 1.2 } h2 { margin: 2.5em 0 .3em; border-top: 1px solid #d3d7de; padding-top: .6em }
table { border-collapse: collapse; font-size: 14px; margin: .6em 0 }
th, td { padding: 3px 12px 3px 0; text-align: left; vertical-align: top; border-bottom: 1px solid #e7e9ed }
td.text { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 12em }
svg { margin: 6px 10px 6px 0 } .faint { color: #69707c } summary { cursor: pointer; color: #69707c }
"""
LEGEND = "Lines: training, by iteration. Dots: held-out data, before and after so many iterations."
FIRST = ("response_length",)  # curves that are always shown, after those that the algorithm reports


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What a run folder holds."""

    path: Path
    config: Row
    about: Reported
    metrics: list[Row]
    evaluations: list[Row]
    samples: list[Row]

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
    """Raises UserError if it is no run folder, and OSError if it can't be read."""
    check_is_folder(path)
    if why := why_no_file(path / CONFIG):
        if "does not exist" not in why:
            raise UserError(f"{path / CONFIG} {why}")
        raise UserError(f"{path} has no {CONFIG}, so it is no run folder; give the folder that train printed")
    config = read_config(path)
    if not config:
        raise UserError(f"{path / CONFIG} can't be read, so it is not known what {path} is a run of; leave it out")
    files = (read_rows(path / name) for name in ("metrics.jsonl", EVALUATIONS, "samples.jsonl"))
    return RunFiles(path, config, reported(path, config), *files)


def page(runs: Sequence[RunFiles], title: str) -> str:
    """The whole page."""
    made_by = {folder.resolve(): number for number, run in enumerate(runs) for folder in run.written}
    body = f"<h1>{escape(title)}</h1>{_overview(runs)}<p class='faint'>{LEGEND}</p>"
    body += "".join(_section(run, number, runs, made_by) for number, run in enumerate(runs))
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style>"
    return printable(f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>\n")


def ends(run: RunFiles) -> dict[str, tuple[float, float]]:
    """The first and the last value of what an algorithm reports, on held-out data where it has an evaluation."""
    found = {}
    for name in (*run.about.headlines, *_scores(run)):
        rows = run.evaluations if any(name in row for row in run.evaluations) else run.metrics
        if values := [y for _, y in finite_points([(index, row.get(name)) for index, row in enumerate(rows)])]:
            found[name] = values[0], values[-1]
    return found


def _overview(runs: Sequence[RunFiles]) -> str:
    """A table with a line for each run."""
    rows = []
    for number, run in enumerate(runs):
        values = "<br>".join(f"{escape(name)} {short(a)} → {short(b)}" for name, (a, b) in ends(run).items())
        link = f"<a href='#run-{number}'>{escape(run.name)}</a>"
        rows.append((link, escape(run.about.title), _done(run), values or "no iteration yet", f"{_seconds(run):,.0f}"))
    return _table(
        ("run", "algorithm", "iterations", "first → last, on held-out data if there are any", "seconds"), rows
    )


def _section(run: RunFiles, number: int, runs: Sequence[RunFiles], made_by: Mapping[Path, int]) -> str:
    """Heading, facts, curves and samples of one run."""
    by = f" by {escape(run.about.strategy)}" if run.about.strategy else ""
    parts = [
        f"<h2 id='run-{number}'>{escape(run.name)}: {escape(run.about.title)}{by}</h2>",
        _facts(run, runs, made_by),
    ]
    shown, others = _curves(run)
    parts.append(shown or "<p class='faint'>No iteration yet.</p>")
    parts.append(f"<details><summary>other metrics</summary>{others}</details>" if others else "")
    return f"<section>{''.join(parts)}{_samples(run)}</section>"


def _done(run: RunFiles) -> str:
    wanted = run.config.get("iterations")
    return f"{len(run.metrics)} of {escape(str(wanted))}" if wanted else str(len(run.metrics))


def _seconds(run: RunFiles) -> float:
    """Of iterations and evaluations."""
    times = [row.get("iteration_s") for row in run.metrics] + [row.get("evaluation_s") for row in run.evaluations]
    return sum(y for _, y in finite_points([(0, one) for one in times]))


def _facts(run: RunFiles, runs: Sequence[RunFiles], made_by: Mapping[Path, int]) -> str:
    """Where models and data come from, and what was written; a model of another run on the page is a link to it."""
    rows = []
    for role, folder in run.models.items():
        maker = None if (place := _place(folder)) is None else made_by.get(place)
        link = "" if maker is None else f", by <a href='#run-{maker}'>{escape(runs[maker].name)}</a>"
        rows.append((f"reads {escape(role)}", f"{escape(folder)}{link}"))
    for label, group in (("reads rows", "data"), ("held-out rows", "eval")):
        options = run.config.get(group)
        if isinstance(options, dict) and options.get("prompts"):
            rows.append((label, escape(str(options["prompts"]))))
    rows += [("writes", escape(str(folder))) for folder in run.written]
    return _table((), rows)


def _place(folder: str) -> Path | None:
    """A folder without links; None if the text is no path."""
    try:
        return Path(folder).resolve()
    except (OSError, ValueError, RuntimeError):
        return None


def _scores(run: RunFiles) -> list[str]:
    """The metrics of an evaluation that scores responses."""
    return [name for name in dict.fromkeys(name for row in run.evaluations for name in row) if "@" in name]


def _curves(run: RunFiles) -> tuple[str, str]:
    """The curves of what is reported, of evaluations and lengths; and those of all other metrics."""
    pictures: dict[str, str] = {}
    for name in dict.fromkeys(name for row in [*run.evaluations, *run.metrics] for name in row):
        line, dots = (finite_points([(row.get("iteration"), row.get(name)) for row in rows]) for rows in _both(run))
        if name != "iteration" and (line or dots):
            pictures[name] = curve(name, line, dots)
    shown = [name for name in dict.fromkeys((*run.about.headlines, *_scores(run), *FIRST)) if name in pictures]
    others = [picture for name, picture in pictures.items() if name not in shown]
    return "".join(pictures[name] for name in shown), "".join(others)


def _both(run: RunFiles) -> tuple[list[Row], list[Row]]:
    return run.metrics, run.evaluations


def _samples(run: RunFiles) -> str:
    """Responses before and after training."""
    rows = []
    for sample in run.samples:
        for when in ("before", "after"):
            if sample.get(when) is not None:
                score = finite_points([(0, sample.get(f"reward_{when}"))])
                number = f"{score[0][1]:+.3f}" if score else ""
                rows.append(
                    (
                        escape(str(sample.get("prompt"))) if when == "before" else "",
                        when,
                        number,
                        escape(str(sample[when])),
                    )
                )
    return _table(("prompt", "", "score", "response"), rows, texts=(0, 3)) if rows else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[int] = ()) -> str:
    """Cells are HTML. texts: columns with text of a model."""
    lines = ["".join(f"<th>{escape(title)}</th>" for title in head)] if head else []
    for row in rows:
        cells = (f"<td{' class=text' if at in texts else ''}>{cell}</td>" for at, cell in enumerate(row))
        lines.append("".join(cells))
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>" if lines else ""
