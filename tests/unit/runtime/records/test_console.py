"""The console of a run: its heading and lines, and the last line that machines read."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_spmd.config import presets
from rlhf_spmd.runtime.records.console import Console, Result
from rlhf_spmd.runtime.records.run_folder import RunFolder, Sample
from rlhf_spmd.runtime.run.metrics import columns_of, metrics_of
from tests.unit.runtime.records.test_run_folder import METRICS, SAMPLES

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


def result(**changes):
    values = {
        "strategy": "flattening", "ranks": 4, "iterations": 2, "saved": ("actor",), "wall_s": 7.5,
        "headlines": {"reward": (-0.5, 0.25), "kl": (0.0, 0.01)}, "gen_tokens_per_s": 1234.5,
        "parity_max_abs": 1e-6, "iteration_s": 0.5, "forecast_s": 0.4, "scaled_by": 1.2, "run_dir": "runs/a",
    }  # fmt: skip
    return Result(**values | changes)


def test_console_of_rank_0(tmp_path):
    stream = io.StringIO()
    console = Console(METRICS, ["reward", "kl", "gen_tokens_per_s"], stream=stream)
    folder = RunFolder(tmp_path)
    folder.notes.append("no picture")
    console.heading("rlhf_spmd", {"actor": "tiny", "prompts": 512})
    console.iteration(1, 10, {"reward": -0.5, "kl": 0.001, "gen_tokens_per_s": 12345.6})
    console.iteration(10, 10, {"reward": 0.25, "gen_tokens_per_s": 1.0, "unknown": 3})
    console.samples(SAMPLES, 3)
    console.closing(result(), folder)
    text = stream.getvalue()
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[1:3] == ["  actor    tiny", "  prompts  512"]
    heading, first, last = lines[3:6]
    assert heading.split() == ["iteration", "reward", "kl", "gen", "tok/s", "left"]
    assert first.split() == ["1/10", "-0.5000", "0.0010", "12,346", "0", "s"]
    assert last.split() == ["10/10", "+0.2500", "-", "1", "0", "s"]
    assert len(heading) == len(first) == len(last)
    for expected in (
        "The film was",
        "note: no picture",
        "timeline.png",
        f"\nNext: python -m rlhf_spmd report {tmp_path}",
        "(forecast: 0.4 s), 7.5 s in all\n",
        f"  trained actor  {tmp_path / 'actor'} (a Hugging Face folder)",
        "  reward         -0.5000 -> +0.2500\n",
        "  kl             0.0000 -> 0.0100 nats per response\n",
    ):
        assert expected in text
    machine = json.loads(lines[-1])
    assert list(machine) == [
        "strategy", "ranks", "iterations", "gen_tokens_per_s", "parity_max_abs", "iteration_s", "forecast_s",
        "scaled_by", "wall_s", "run_dir", "reward_timeouts", "saved", "reward_first", "reward_last",
        "kl_first", "kl_last",
    ]  # fmt: skip
    assert (machine["reward_first"], machine["reward_last"], machine["kl_last"]) == (-0.5, 0.25, 0.01)
    assert machine["saved"] == ["actor"]
    Console(METRICS, stream=stream).closing(result(saved=(), forecast_s=None), RunFolder(tmp_path))
    later = stream.getvalue().removeprefix(text)
    assert "Hugging Face" not in later and "0.5 s per iteration, 7.5 s in all" in later


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


def test_samples_without_scores_are_the_first():
    stream = io.StringIO()
    Console(METRICS, stream=stream).samples([Sample(index, "say", "bo", None) for index in range(4)], 2)
    assert [line for line in stream.getvalue().splitlines() if line.startswith("sample ")] == ["sample 0", "sample 3"]
