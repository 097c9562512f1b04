"""Recipes: rows computed again, also by the command that a user would type; how a recipe is chosen; what documents
recommend."""

import json
from pathlib import Path

import pytest

from bench.columns import FAST
from bench.forecast.recipes import Place, row_of
from bench.rows import ABOUT, RESULTS, read_rows
from rlhf_spmd.__main__ import main

OF_PLACE = ("algorithm", "preset", "layout")
ROWS = {
    Place(*(row[key] for key in OF_PLACE), f"{row['device_type']}-derived", row["network"]): row
    for row in read_rows(RESULTS / "recipes.jsonl")
}
AGAIN = (
    Place("ppo", "qwen2.5-0.5b", "1x1", "a100-40g-derived"),
    Place("grpo", "qwen2.5-7b", "1x8", "a100-80g-derived"),
    Place("grpo+lora", "qwen2.5-7b", "1x8", "a100-40g-derived"),
    Place("ppo", "qwen2.5-32b", "1x1", "a100-80g-derived"),  # does not fit
)
QUICK = (AGAIN[0], AGAIN[3])
COPIED = ("README.md", "docs/slurm.md", "docs/gsm8k.md", "slurm/env.sh")  # whose commands are for GPUs


@pytest.mark.parametrize(
    "place", [pytest.param(one, marks=[] if one in QUICK else pytest.mark.slow) for one in AGAIN], ids=str
)
def test_rows_are_computed_again(place):
    kept = {name: one for name, one in ROWS[place].items() if name not in ABOUT}
    again = json.loads(json.dumps(row_of(place)))
    for found in (kept, again):
        found["strategies"] = {name: without_seconds(one) for name, one in found["strategies"].items()}
    assert again.get("iteration_s") == pytest.approx(kept.get("iteration_s"))
    assert without_seconds(again) == without_seconds(kept)


def without_seconds(row: dict) -> dict:
    """Without words, too: a message may change, that there is one may not."""
    return {name: bool(one) if name == "why_not" else one for name, one in row.items() if name != "iteration_s"}


@pytest.mark.parametrize("place", AGAIN[:3], ids=str)
def test_the_command_with_the_options_of_a_row_forecasts_its_seconds_and_bytes(place, capsys):
    row = ROWS[place]
    words = ["--algorithm", place.page, "--preset", place.preset, "--layout", place.layout]
    words += ["--device-type", row["device_type"], *row["overrides"].split(), *row["options"].split()]
    assert main(["forecast", row["strategy"], *words]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["forecast_s"], found["peak_bytes"]) == pytest.approx((row["iteration_s"], row["peak_bytes"]))
    assert found["calibration"] == row["calibration"]


def test_no_command_to_copy_has_a_strategy_that_is_behind():
    """With a fast network separation is the recipe for PPO on eight nodes only, unless nothing else fits."""
    fast = {place: row for place, row in ROWS.items() if row["strategy"] and place.network == FAST}
    fits = {
        place: [name for name, one in row["strategies"].items() if "iteration_s" in one] for place, row in fast.items()
    }
    separated = [place for place, row in fast.items() if row["strategy"] == "separation" and len(fits[place]) > 1]
    assert {(place.page, place.layout) for place in separated} == {("ppo", "8x8")}
    root = Path(__file__).parents[3]
    for name in COPIED:
        assert "--strategy separation" not in (root / name).read_text(encoding="utf-8"), name
