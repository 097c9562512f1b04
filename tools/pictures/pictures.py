"""The pictures of the documents, drawn from bench/results/ and from what the code computes; nothing is measured.

Cost: seconds. Command: python -m tools pictures
"""

import argparse
import hashlib
import json
from pathlib import Path

from bench.rows import RESULTS, TIMELINES, read_rows
from tools.pictures import lag_plots, planner_plots, plots

DRAWN_FROM = RESULTS / "pictures.json"
ROWS = ("scan", "validate", "validate_rest", "lag")
MAPS = ("flattening", "interleaving1", "interleaving2", "separation", "reallocation")


def draw(folder: Path = RESULTS) -> list[Path]:
    """Writes all of them."""
    rows = {name: read_rows(RESULTS / f"{name}.jsonl") for name in ROWS}
    return [
        plots.maps(MAPS, folder / "maps.png"),
        plots.published(rows["validate"], folder / "validate.png"),
        plots.published_bars([*rows["validate"], *rows["validate_rest"]], folder / "validate_bars.png"),
        lag_plots.lag_picture(rows["lag"], folder / "lag.png"),
        planner_plots.behind(rows["scan"], folder / "separation_behind.png"),
        *plots.draw(rows["scan"], folder),
        *plots.timelines(folder),
    ]


def sources() -> dict[str, str]:
    """Returns the fingerprints of the files of results that pictures are drawn from."""
    paths = [TIMELINES, *(RESULTS / f"{name}.jsonl" for name in ROWS)]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in paths}


def main(arguments: list[str]) -> int:
    argparse.ArgumentParser(prog="tools pictures", description=__doc__.partition("\n")[0]).parse_args(arguments)
    drawn = draw()
    DRAWN_FROM.write_text(json.dumps(sources(), indent=2) + "\n", encoding="utf-8")  # a test finds old pictures
    print(json.dumps({"tool": "pictures", "files": [path.name for path in drawn], "ok": True}))
    return 0
