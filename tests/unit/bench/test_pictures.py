"""The pictures of the documents: what they are drawn from, and that every one of them is shown somewhere."""

import json
from pathlib import Path

import pytest

from bench.rows import RESULTS
from tools.pictures import pictures

ROOT = Path(__file__).parents[3]
SHOWN = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "bench").glob("*.md")]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.png")), ids=lambda path: path.name)
def test_every_picture_is_shown(path):
    pages = [page for page in SHOWN if f"results/{path.name})" in page.read_text(encoding="utf-8")]
    assert pages, f"no page shows {path.name}: show it, or delete it"


def test_pictures_are_drawn_from_the_rows_of_today():
    """resume.png said 700 runs when there were rows of 780."""
    drawn = json.loads(pictures.DRAWN_FROM.read_text(encoding="utf-8"))
    assert drawn == pictures.sources(), "rows have changed: draw again with `python -m tools pictures`"
