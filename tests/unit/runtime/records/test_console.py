"""The console of a run: its heading and lines, and the last line that machines read."""

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_spmd.config import presets
from rlhf_spmd.runtime.records.console import Console
from rlhf_spmd.runtime.records.run_folder import Sample
from rlhf_spmd.runtime.run.metrics import columns_of, metrics_of
from tests.unit.runtime.records.test_run_folder import METRICS

PAGES = sorted(
    path.stem
    for path in Path(presets.__file__).parents[1].joinpath("algorithms").glob("*.py")
    if "\ndef workflow(" in path.read_text(encoding="utf-8")
)
MORE = {  # options with which a page has all of its columns
    "grpo": ["grpo.kl_coef=0.1", "grpo.drop_equal_groups=true", "grpo.oversampling=2"],
    "rloo": ["rloo.kl_coef=0.1"],
    "sft": ["mini_batch_tokens=64"],
}


@pytest.mark.parametrize("page", PAGES)
def test_no_line_of_the_table_is_longer_than_80_columns(page, monkeypatch):
    """With KL, oversampling and timeouts, and values of seven digits."""
    config = replace(presets.load("model", MORE.get(page, []), algorithm=page), reward_timeout_s=5.0)
    workflow = config.algorithm.workflow(config.options)
    known = metrics_of(config.algorithm, workflow)
    columns = columns_of(known, config, workflow)
    for width in (80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        stream = io.StringIO()
        console = Console(known, columns, stream=stream)
        console.iteration(1, 7_654_321, {"iteration_s": 1234567.8})  # the first iteration measures nothing else
        for value in (1234567.8, -1234567.8, 0.0, math.nan):
            console.iteration(7_654_321, 7_654_321, dict.fromkeys(columns, value))
        heading, *lines = stream.getvalue().splitlines()
        assert {len(line) for line in lines} == {len(heading)} and len(heading) <= width, stream.getvalue()
        shown = [known[name].column for name in columns if f" {known[name].column}" in heading]
        assert width == 80 or len(shown) == len(columns), heading
        assert shown and "left" in heading and "7654321/7654321" in lines[-1]


@pytest.mark.parametrize(
    ("num", "shown"), [(1, ["2"]), (2, ["4", "1"]), (3, ["4", "2", "1"]), (9, ["4", "0", "2", "5", "1"])]
)
def test_samples_from_the_largest_gain_to_the_largest_loss(num, shown):
    """They were the first prompts, whatever training had done to them; the fourth of these has no score."""
    gains = {0: 0.5, 1: -1.0, 2: 0.0, 3: math.nan, 4: 2.0, 5: -0.5}
    samples = [Sample(index, "say", "bo", 1.0, "ba", 1.0 + gain) for index, gain in gains.items()]
    stream = io.StringIO()
    Console(METRICS, stream=stream).samples(samples, num)
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines if line.startswith("sample ")] == shown
    assert "5 prompts: mean +1.000 -> +1.200; below from the largest gain to the largest loss" in lines
