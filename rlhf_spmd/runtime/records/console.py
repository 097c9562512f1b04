"""Prints a run: a heading, a line per iteration, samples, what was learned and where it is, and one next command; where
there is no terminal, one JSON line last.

Plain lines on standard output, the same in a terminal and in a batch job's log. No line of the
table is longer than the terminal is wide. Only rank 0's console is enabled.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
import textwrap
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import NamedTuple, TextIO

from rlhf_spmd.algorithms.page import Metric
from rlhf_spmd.config.evaluation_metrics import titled
from rlhf_spmd.files import output, progress
from rlhf_spmd.files.json_text import finite
from rlhf_spmd.files.printing import command_lines, formatted, printable
from rlhf_spmd.runtime.records.run_folder import RunFolder, Sample, format_samples

NUMBER, LEFT = "iteration", "left"  # columns that are no metrics: the number, and the time that is left
MOST_TEXT = 120  # columns of samples
NEXT = "Next: "
RECENT = 10  # iterations by whose seconds the time that is left is estimated


@dataclass(frozen=True, slots=True)
class Result:
    """The last line of standard output, for machines. None and NaN, which become null, stand for a value not measured.

    iteration_s, forecast_s: measured and forecast seconds of an iteration.
    scaled_by: the scale of the calibration in the forecast (forecast_report.py).
    """

    strategy: str
    ranks: int
    iterations: int
    headlines: Mapping[str, tuple[float, float]]  # first and last value of the algorithm's headline metrics
    gen_tokens_per_s: float | None
    parity_max_abs: float
    iteration_s: float | None
    forecast_s: float | None
    scaled_by: float | None
    wall_s: float
    run_dir: str
    reward_timeouts: int = 0  # responses for which a reward function ran out of time; > 0: the run is not exact
    saved: tuple[str, ...] = ()  # roles whose trained models are in the run folder
    evaluation: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # first and last value of its metrics

    def to_json(self) -> str:
        values = asdict(self)
        for name, (first, last) in values.pop("evaluation").items():
            values |= {f"eval_{name}_first": first, f"eval_{name}_last": last}
        for name, (first, last) in values.pop("headlines").items():
            values |= {f"{name}_first": first, f"{name}_last": last}
        return json.dumps(finite(values))


class Column(NamedTuple):
    """A column of the table.

    name: its metric, NUMBER or LEFT.
    leaves: as in Metric.
    """

    name: str
    heading: str
    form: str
    width: int
    leaves: int


def columns_that_fit(columns: Sequence[Column], width: int) -> list[Column]:
    """Returns the columns that are shown in so many places, with two spaces between them. The first one always is."""
    shown = list(columns)
    while len(shown) > 1 and sum(column.width + 2 for column in shown) - 2 > width:
        last = max(range(1, len(shown)), key=lambda index: (shown[index].leaves, index))
        del shown[last]
    return shown


def cell(value: float, form: str, width: int) -> str:
    """Formats a number for so many places: with fewer digits if the format takes more."""
    scale, unit = (100.0, "%") if form.endswith("%}") else (1.0, "")
    forms = [f"{{:.{digits}g}}" for digits in (6, 5, 4, 3, 2, 1)]
    texts = [formatted(value, form), *(f"{formatted(value * scale, one)}{unit}" for one in ("{:.0f}", *forms))]
    return next((text for text in texts if len(text) <= width), "*" * width).rjust(width)


def scores_of(sample: Sample) -> tuple[float, float]:
    """Returns the scores before and after training, NaN where there is none."""
    before, after = sample.reward_before, sample.reward_after
    return math.nan if before is None else before, math.nan if after is None else after


def by_gain(samples: Sequence[Sample]) -> list[Sample]:
    """Returns the samples with two scores, from the largest gain to the largest loss."""
    gains = [after - before for before, after in map(scores_of, samples)]
    known = [index for index, gain in enumerate(gains) if math.isfinite(gain)]
    return [samples[index] for index in sorted(known, key=lambda index: -gains[index])]


def spread(samples: Sequence[Sample], num: int) -> list[Sample]:
    """Returns at most so many samples, from the first to the last, evenly; a single one is from the middle."""
    last = len(samples) - 1
    places = [round(place * last / (num - 1)) for place in range(num)] if num > 1 else [last // 2] * num
    return [samples[place] for place in dict.fromkeys(places)]


class Console:
    """Prints for people. Prints nothing if `enabled` is false: on every rank but 0, and once the stream is closed."""

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        columns: Sequence[str] = (),
        *,
        enabled: bool = True,
        stream: TextIO | None = None,
        as_json: bool | None = None,
    ) -> None:
        """Prepares the console.

        metrics: of the run.
        columns: the names of those that are shown, in their order.
        as_json: --json or --no-json.
        """
        self.metrics, self.columns, self.enabled = metrics, columns, enabled
        self.stream, self.as_json = stream or sys.stdout, as_json
        self.room = output.table_width(self.stream)  # columns of the terminal; None: there is none
        self._columns: list[Column] = []
        self._ended_s: deque[float] = deque(maxlen=RECENT + 1)  # when the last iterations ended

    def heading(self, title: str, facts: Mapping[str, object]) -> None:
        """Prints a title and one aligned line per fact, e.g. {"actor": "1.2 M parameters", "prompts": "512 from
        p.jsonl"}."""
        self._print(title)
        self._print_facts(facts)

    def note(self, text: str) -> None:
        """Prints a line between others, unless it is empty."""
        if text:
            self._print(text)

    def iteration(self, number: int, total: int, metrics: Mapping[str, float]) -> None:
        """Prints one line of the progress table; the first call also prints the headings.

        number: from 1.
        """
        if not self._columns:
            places = max(len(NUMBER), len(str(total)) * 2 + 1)
            self._columns = [Column(NUMBER, NUMBER, "", places, 0)]
            for name in self.columns:
                metric = self.metrics[name]
                width = max(len(metric.column), len(metric.form.format(0.0)))
                self._columns.append(Column(name, metric.column, metric.form, width, metric.leaves))
            self._columns.append(Column(LEFT, LEFT, "", 6, 0))
            self._columns = columns_that_fit(self._columns, self.room or output.width())
            headings = [column.heading.rjust(column.width) for column in self._columns]
            self._print("  ".join(headings))
        self._ended_s.append(time.monotonic())
        texts = {NUMBER: f"{number}/{total}", LEFT: progress.duration(self.left_s(number, total, metrics))}
        cells = []
        for name, _, form, width, _ in self._columns:
            told = cell(metrics[name], form, width) if name in metrics else texts.get(name, "-")
            cells.append(told.rjust(width))
        self._print("  ".join(cells))

    def left_s(self, number: int, total: int, metrics: Mapping[str, float]) -> float:
        """Returns estimated seconds that the iterations after this one take, with what is done between them."""
        each_s = metrics.get("iteration_s", 0.0)
        if len(self._ended_s) > 1:
            each_s = (self._ended_s[-1] - self._ended_s[0]) / (len(self._ended_s) - 1)
        return max(total - number, 0) * max(each_s, 0.0)

    def samples(self, samples: Sequence[Sample], num: int) -> None:
        """Prints some responses before and after training, one below the other: of three the one that has gained most,
        the median and the one that has lost most."""
        if not samples:
            return
        width, known = min(MOST_TEXT, self.room or output.width()), by_gain(samples)
        self._print("\nResponses before and after training, with their scores")
        if known:
            before, after = (fmean(scores) for scores in zip(*map(scores_of, known), strict=True))
            means = f"{formatted(before, '{:+.3f}')} -> {formatted(after, '{:+.3f}')}"
            self._print(f"{len(known)} prompts: mean {means}; below from the largest gain to the largest loss\n")
        for line in format_samples(spread(known or samples, num), width).removesuffix("\n").split("\n"):
            self._print(line)

    def closing(self, result: Result, folder: RunFolder) -> None:
        """Prints what was learned, where it is, what to do next and, where that is wanted, the result as JSON."""
        path = folder.shown
        facts: dict[str, object] = {}
        for name, (first, last) in result.headlines.items():
            form, unit = self.metrics[name].form, self.metrics[name].headline
            facts[name] = f"{formatted(first, form).strip()} -> {formatted(last, form).strip()} {unit}".rstrip()
        if result.evaluation:
            ends = titled({name: " -> ".join(map(formatted, values)) for name, values in result.evaluation.items()})
            facts["evaluation"] = ", ".join(f"{name} {values}" for name, values in ends.items())
        generated = result.gen_tokens_per_s is not None
        speed = [f"{result.gen_tokens_per_s:,.0f} tokens/s generated"] if generated else []
        if result.iteration_s is not None:
            beside = "" if result.forecast_s is None else f" (forecast: {result.forecast_s:.3g} s)"
            speed.append(f"{result.iteration_s:.3g} s per iteration{beside}")
        facts["speed"] = ", ".join([*speed, f"{result.wall_s:.1f} s in all"])
        if math.isfinite(result.parity_max_abs):
            facts["parity"] = f"{result.parity_max_abs:.2g} nats at most between generation and training"
        facts["run folder"] = path
        facts["files in it"] = ", ".join(["metrics.jsonl", "timeline.png", *(["samples.txt"] if generated else [])])
        for role in result.saved:
            is_adapter = (path / role / "adapter_config.json").is_file()
            kind = "an adapter, as peft stores it" if is_adapter else "a Hugging Face folder"
            facts[f"trained {role}"] = f"{path / role} ({kind})"
        ranks = "1 rank" if result.ranks == 1 else f"{result.ranks} ranks"
        iterations = "1 iteration" if result.iterations == 1 else f"{result.iterations} iterations"
        self._print(f"\nDone: {iterations} of {result.strategy} on {ranks}")
        self._print_facts(facts)
        for text in folder.notes:
            self._print(f"  note: {text}")
        report = ["python", "-m", "rlhf_spmd", "report", str(path), "--out", str(path / "report.html")]
        self._print(NEXT + command_lines(list(map(shlex.quote, report)), self.room, before=len(NEXT)))
        if self.room is None if self.as_json is None else self.as_json:
            self._print(result.to_json())

    def _print_facts(self, facts: Mapping[str, object]) -> None:
        """Prints one line for each fact; in a terminal it is wrapped between words."""
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            lines = [str(value)]
            if self.room is not None:
                room = max(20, self.room - width - 4)
                lines = textwrap.wrap(str(value), room, break_long_words=False, break_on_hyphens=False) or [""]
            self._print(f"  {name.ljust(width)}  {lines[0]}")
            for line in lines[1:]:
                self._print(" " * (width + 4) + line)

    def _print(self, text: str = "") -> None:
        if self.enabled:
            print(printable(text), file=self.stream, flush=True)
