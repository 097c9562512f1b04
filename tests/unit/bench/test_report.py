"""The page of all results: a section for each file, nothing from elsewhere, rows in order."""

import re

from bench.report import natural, page, table
from bench.rows import RESULTS


def test_every_file_of_results_has_a_section():
    text = page(RESULTS)
    names = {path.stem for path in RESULTS.iterdir() if path.suffix in (".jsonl", ".png")}
    assert set(re.findall(r'<h2 id="([^"]+)"', text)) == names and len(names) > 5
    assert text.count("<img ") == len(list(RESULTS.glob("*.png")))
    assert text.count("<table>") == len(list(RESULTS.glob("*.jsonl")))


def test_nothing_is_fetched():
    text = page(RESULTS)
    assert not re.search(r"<script|<link|https?://", text)
    assert all(source.startswith("data:image/png;base64,") for source in re.findall(r'src="([^"]*)"', text))


def test_unknown_files_show_all_plain_values(tmp_path):
    (tmp_path / "new.jsonl").write_text(
        '{"a": "<b>", "n": 1.23456, "commit": "c0"}\n{"a": "x", "m": [1, 2]}\n', encoding="utf-8"
    )
    text = page(tmp_path)
    assert "&lt;b&gt;" in text and "<b>" not in text
    assert "1.235" in text and "[1, 2]" in text and "<th>commit" not in text and "c0</p>" in text


def test_rows_are_in_order():
    rows = [{"size": size, "name": name} for size, name in ((10, "a"), (9, "b"), (1000, "a"), (9, "a"))]
    found = re.findall(r"<td>([^<]*)</td>", table("new", rows))
    assert found == ["9", "a", "9", "b", "10", "a", "1000", "a"]
    assert natural(["1,000"]) > natural(["999"]) and natural(["5"]) < natural(["five"])
