"""The pictures of the documents: what they are drawn from, and that every one of them is shown somewhere."""

import json
import re
from pathlib import Path

import pytest

from bench.ahead_tables import MEASURES, paired
from bench.numbers.lag import CORRECTIONS, PAGES, SEEDS
from bench.numbers.lag import cases as lag_cases
from bench.rows import RESULTS, TIMELINES, read_rows
from bench.speed.strategies import median_iteration, of_iterations
from rlhf_spmd.runtime.pictures import picture
from tests.programs import make_workload
from tools.pictures import diagrams, lag_plots, pictures, plots

ROOT = Path(__file__).parents[3]
SHOWN = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "bench").glob("*.md")]


def test_the_median_iteration_is_drawn():
    spans = [["a", "compute", 10.0 + at, 10.5 + at, at, {"epoch": 1}] for at in (5, 6, 7)]
    records = [{"rank": rank, "host": "a", "spans": spans} for rank in (0, 1)]
    seconds = [99.0, 3.0, 1.0, 2.0, 2.0, 5.0, 2.1, 0.1]
    assert median_iteration(records, seconds) == 6
    (one, other) = of_iterations(records, [6])
    assert one["spans"] == other["spans"] == [["a", "compute", 0.0, 0.5, 6, {}]] and one["rank"] == 0


def test_diagrams_are_drawn(tmp_path):
    drawn = [
        diagrams.program_picture(tmp_path / "program.png"),
        diagrams.weights_picture(tmp_path / "weights.png"),
        diagrams.resume_picture(tmp_path / "resume.png", read_rows(RESULTS / "faults.jsonl")),
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000 for path in drawn)


def test_calls_stand_below_what_they_read():
    depths = diagrams.depths(make_workload().workflow)
    assert depths["actor_generate"] == 0 and depths["reference_infer"] == depths["critic_infer"] == 1
    assert depths["actor_train"] == depths["critic_train"] == depths["estimate_advantages"] + 1 == 3


def test_pages_say_whether_timelines_were_measured():
    kind = json.loads(TIMELINES.read_text(encoding="utf-8"))["kind"]
    assert kind in ("measured", "forecast")
    for name in ("strategies.png", "timeline_demo.png"):
        alts = [re.findall(rf"!\[([^]]*)\]\([^)]*results/{name}\)", page.read_text(encoding="utf-8")) for page in SHOWN]
        assert any(alts) and all(alt.lower().startswith(kind) for found in alts for alt in found)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.png")), ids=lambda path: path.name)
def test_every_picture_is_shown(path):
    pages = [page for page in SHOWN if f"results/{path.name})" in page.read_text(encoding="utf-8")]
    assert pages, f"no page shows {path.name}: show it, or delete it"


def test_pictures_are_drawn_from_the_rows_of_today():
    """resume.png said 700 runs when there were rows of 780."""
    drawn = json.loads(pictures.DRAWN_FROM.read_text(encoding="utf-8"))
    assert drawn == pictures.sources(), "rows have changed: draw again with `python -m tools pictures`"


def rows_of_lag(pages=PAGES, seeds=SEEDS) -> list[dict]:
    """Makes rows in which each correction costs a tenth of its lag, a little more or less by seed."""
    rows = []
    for page, lag, correction, seed in lag_cases():
        if page in pages and seed in seeds:
            case = {"page": page, "seed": seed, "lag": lag, "correction": correction}
            case |= {"actor_lr": 1e-4, "warmup": 0}
            rows.append(case | dict.fromkeys(MEASURES.values(), 0.9 - 0.1 * lag - 0.01 * seed * lag))
    return rows


@pytest.mark.parametrize(
    ("rows", "words", "points"),
    [
        (read_rows(RESULTS / "lag.jsonl"), "pairs.", None),
        (rows_of_lag(), "intervals of 5 pairs.", [-12.0, -24.0, -48.0]),
        (rows_of_lag(("grpo",), (0, 1, 2)), "intervals of 3 pairs.", [-11.0, -22.0, -44.0]),
    ],
    ids=["committed", "whole", "begun"],
)
def test_a_lag_is_drawn_with_its_intervals(rows, words, points, tmp_path, monkeypatch):
    """From the first pairs on; a panel without any says so."""
    kept = []
    monkeypatch.setattr(picture.Picture, "save", lambda self, path: kept.append(self.draw()))
    lag_plots.lag_picture(rows, tmp_path / "lag.png")
    [figure] = kept
    assert any(text.get_text().endswith(words) for text in figure.texts)
    pages = {one["page"] for one in paired(rows)}
    for page, axes in zip(PAGES, figure.axes, strict=True):
        assert [one.get_label() for one in axes.containers] == list(CORRECTIONS)
        assert [text.get_text() for text in axes.texts] == ([] if page in pages else ["not measured yet"])
        for one in axes.containers if points and page in pages else ():
            assert one.lines[0].get_ydata() == pytest.approx(points)
            (lower, upper) = one.lines[2][0].get_segments()[0][:, 1]
            half = next(100 * pair["half"] for pair in paired(rows) if (pair["page"], pair["lag"]) == (page, 1))
            assert (upper - lower) / 2 == pytest.approx(half) and (upper + lower) / 2 == pytest.approx(points[0])


def test_the_legend_of_published_runs_lies_on_nothing(tmp_path, monkeypatch):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    kept = []
    monkeypatch.setattr(picture.Picture, "save", lambda self, path: kept.append(self.draw()))
    plots.published(read_rows(RESULTS / "validate.jsonl"), tmp_path / "validate.png")
    [figure] = kept
    renderer = FigureCanvasAgg(figure).get_renderer()
    [axes] = figure.axes
    legend = axes.get_legend().get_window_extent(renderer)
    assert legend.x0 >= 0 and legend.x1 <= figure.bbox.width and legend.x0 >= axes.bbox.x1
    assert not any(text.get_window_extent(renderer).overlaps(legend) for text in figure.texts)
