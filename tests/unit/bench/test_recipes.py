"""Recipes: rows computed again, also by the command that a user would type; how a recipe is chosen; what documents
recommend."""

import json
from pathlib import Path

import pytest

from bench.forecast import recipes, tuning
from bench.forecast.recipes import Place, arguments, grid, places, recipe, row_of
from bench.recipe_tables import by_strategy
from bench.rows import ABOUT, RESULTS, read_rows
from rlhf_spmd.__main__ import main
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster

OF_PLACE = ("algorithm", "preset", "layout", "device_type", "network")
ROWS = {Place(*(row[key] for key in OF_PLACE)): row for row in read_rows(RESULTS / "recipes.jsonl")}
AGAIN = (
    Place("ppo", "qwen2.5-0.5b", "1x1", "a100-40g"),
    Place("grpo", "qwen2.5-7b", "1x8", "a100-80g"),
    Place("grpo+lora", "qwen2.5-7b", "1x8", "a100-40g"),
    Place("ppo", "qwen2.5-32b", "1x1", "a100-80g"),  # does not fit
)
COPIED = ("README.md", "docs/slurm.md", "docs/gsm8k.md", "slurm/env.sh")  # whose commands are for GPUs


def test_every_place_has_a_row():
    assert list(ROWS) == list(places()) and len(ROWS) == 144


@pytest.mark.parametrize("place", AGAIN, ids=str)
def test_rows_are_computed_again(place):
    kept = {name: one for name, one in ROWS[place].items() if name not in ABOUT}
    again = json.loads(json.dumps(row_of(place)))
    for found in (kept, again):
        found["strategies"] = {name: without_seconds(one) for name, one in found["strategies"].items()}
    assert again.get("iteration_s") == pytest.approx(kept.get("iteration_s"))
    assert without_seconds(again) == without_seconds(kept)


def without_seconds(row: dict) -> dict:
    return {name: one for name, one in row.items() if name != "iteration_s"}


@pytest.mark.parametrize("place", AGAIN[:3], ids=str)
def test_the_command_with_the_options_of_a_row_forecasts_its_seconds_and_bytes(place, capsys):
    row = ROWS[place]
    words = ["--algorithm", place.page, "--preset", place.preset, "--layout", place.layout]
    words += ["--device-type", place.device, *row["overrides"].split(), *row["options"].split()]
    assert main(["forecast", row["strategy"], *words]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["forecast_s"], found["peak_bytes"]) == pytest.approx((row["iteration_s"], row["peak_bytes"]))
    assert found["calibration"] == row["calibration"]


def test_the_simplest_of_the_fastest_is_the_recipe():
    assert recipe({"flattening": 101.0, "reallocation": 100.0}) == "flattening"
    assert recipe({"flattening": 103.0, "separation": 101.0, "reallocation": 100.0}) == "reallocation"
    assert recipe({"separation": 5.0}) == "separation" and recipe({}) is None
    for row in ROWS.values():
        fitting = {name: one["iteration_s"] for name, one in row["strategies"].items() if "iteration_s" in one}
        assert row["strategy"] == recipe(fitting) and ("iteration_s" in row) == bool(fitting)
        assert row.get("peak_bytes", 0) < 0.94 * 2**30 * row["device_gib"]


def test_arguments_are_options_that_differ_from_their_defaults():
    options = {"zero": 2, "tp": 1, "recompute": True, "micro_batch": None}
    assert arguments("flattening", options) == "strategy.zero=2 strategy.recompute=true"
    assert arguments("separation", {"ratios": ("actor=1/2", "critic=1/2")}) == "strategy.ratios=actor=1/2,critic=1/2"


def test_the_first_forecast_is_not_of_a_pipeline_whose_last_stage_is_slow():
    """The output layer of 152,064 tokens is half of the last of eight stages."""
    workload = make_workload(load("qwen2.5-7b", recipes.ALGORITHMS["grpo"], algorithm="grpo"))
    cluster, calibration = Cluster.parse("1x8", "a100-80g"), load_calibration("a100-80g-derived")
    few = {"training_tp": (1,), "training_pp": (1, 8), "generation_tp": (4,), "zero": (0, 2), "micro_batch": (1, 4)}
    best = tuning.best_options(load_strategy("reallocation"), workload, cluster, calibration, few, most=1)
    assert best.options["training_pp"] == 1 and best.forecast.makespan_s < 33


def test_strategies_are_compared_where_they_fit():
    one = {"iteration_s": 2.0, "strategy": "flattening", "layout": "1x8", "network": recipes.FAST, "algorithm": "ppo"}
    strategies = {"flattening": {"iteration_s": 2.0}, "separation": {"iteration_s": 3.0}}
    rows = [one | {"strategies": strategies}, one | {"strategies": strategies | {"separation": {"why_not": "large"}}}]
    flattening, separation = by_strategy(rows)
    assert (flattening["recipe"], flattening["fits"], flattening["times"]) == (2, 2, [1.0, 1.0])
    assert (separation["recipe"], separation["fits"], separation["times"]) == (0, 1, [1.5])


def test_no_command_to_copy_has_a_strategy_that_is_behind():
    """In no place of one node, or with a fast network, is separation the recipe, unless nothing else fits."""
    fast = {place: row for place, row in ROWS.items() if row["strategy"] and place.network == recipes.FAST}
    fits = {
        place: [name for name, one in row["strategies"].items() if "iteration_s" in one] for place, row in fast.items()
    }
    assert not [place for place, row in fast.items() if row["strategy"] == "separation" and len(fits[place]) > 1]
    root = Path(__file__).parents[3]
    for name in COPIED:
        assert "--strategy separation" not in (root / name).read_text(encoding="utf-8"), name


def test_grids_have_options_of_their_strategies():
    for name in recipes.STRATEGIES:
        assert grid(name, 8).keys() <= load_strategy(name).parameters.keys()
